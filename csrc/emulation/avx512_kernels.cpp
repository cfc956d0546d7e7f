// The AVX-512 kernel table on a CPU without AVX-512, for tests.
#include "../avx512/kernels.cpp"
