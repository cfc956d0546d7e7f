// The kernel table for any CPU: plain C++, and the truth that the other tables are tested against.
#include "../simd/generic.h"

#define OCTAVO_ATTENTION_ROWS 3

#include "../ops/stored_integer.h"

namespace {

using octavo::kGroup;
using octavo::LinearTask;
using octavo::WeightKind;

// Integer sums of a part of one group: sixteen columns times one row.
template <WeightKind Kind>
IVec part_sums(const uint8_t* w, const int8_t* x, int part) {
    constexpr int kPartK = kGroup / IntFormat<Kind>::kParts;
    IVec sum = {};
    for (int k = part * kPartK; k < (part + 1) * kPartK; ++k)
        for (int c = 0; c < kLanes; ++c) sum.lane[c] += stored_integer<Kind>(w, k, c) * x[k];
    return sum;
}

template <WeightKind Kind>
void linear_int(const LinearTask& t) {
    using Format = IntFormat<Kind>;
    constexpr int kParts = Format::kParts;
    const int groups = t.w->cols / kGroup;
    for (int panel = t.panel_begin; panel < t.panel_end; ++panel) {
        for (int row = t.row_begin; row < t.row_end; ++row) {
            GroupWalk<Kind> w(t.w->data + panel * t.w->panel_stride);
            const IntRow x(t.q, row, groups);
            Vec acc = zero();
            for (int g = 0; g < groups; ++g) {
                w.move_to(g);
                for (int part = 0; part < kParts; ++part) {
                    const Vec products = to_float(part_sums<Kind>(w.integers(), x.q + g * kGroup, part));
                    acc = fma(mul(products, set1(x.scale[g])), scale_of<Kind>(w.at, part), acc);
                }
                for (int part = 0; Format::kHasOffset && part < kParts; ++part)
                    acc = fma(set1(x.part_sum(kParts, part, g)), minimum_of<Kind>(w.at, part), acc);
            }
            store(t.out + (row - t.row_begin) * t.out_stride + (panel - t.panel_begin) * kLanes, acc);
        }
    }
}

}  // namespace

#include "../ops/kernel_table.h"

namespace octavo {

const Kernels& generic_kernels() {
    static constexpr Kernels table = kernel_table("generic");
    return table;
}

}  // namespace octavo
