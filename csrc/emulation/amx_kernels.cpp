// The AMX kernel table on a CPU without AMX, for tests.
#include "../amx/kernels.cpp"
