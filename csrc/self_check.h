// Does a kernel table compute what the generic one does, on this very machine? A few microseconds at start.
#pragma once

#include "ops/types.h"

namespace octavo {

// Compares small products of every weight kind bit for bit: what a new CPU, a virtual machine that emulates
// instructions, or a misjudged feature bit would get wrong first.
bool agrees_with_generic(const Kernels& kernels);

}  // namespace octavo
