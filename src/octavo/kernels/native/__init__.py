"""The native CPU backend: records a model's ops once, replays them in C++ with one call per step."""
