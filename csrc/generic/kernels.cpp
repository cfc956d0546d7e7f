// The kernel table for any CPU: plain C++, and the truth that the other tables are tested against.
#include "../simd/generic.h"

#define OCTAVO_ATTENTION_ROWS 3

#include "../ops/linear_int.h"

namespace {

using octavo::kGroup;
using octavo::LinearTask;
using octavo::WeightKind;

// Integer sums of one group: sixteen columns times one row.
template <class Format>
IVec group_sums(const uint8_t* w, const int8_t* x) {
    IVec sum = {};
    for (int step = 0; step < (Format::kNibbles ? 4 : 8); ++step) {
        for (int c = 0; c < kLanes; ++c) {
            for (int j = 0; j < 4; ++j) {
                const uint8_t byte = w[(step * kLanes + c) * 4 + j];
                if (Format::kNibbles) {
                    sum.lane[c] += (byte & 15) * x[4 * step + j] + (byte >> 4) * x[16 + 4 * step + j];
                } else {
                    sum.lane[c] += static_cast<int8_t>(byte) * x[4 * step + j];
                }
            }
        }
    }
    return sum;
}

template <WeightKind Kind>
void linear_int(const LinearTask& t) {
    using Format = IntFormat<Kind>;
    const int groups = t.w->cols / kGroup;
    for (int panel = t.panel_begin; panel < t.panel_end; ++panel) {
        for (int row = t.row_begin; row < t.row_end; ++row) {
            const uint8_t* w = t.w->data + panel * t.w->panel_stride;
            const int8_t* x = t.q.q + row * t.q.cols;
            const float* scale = t.q.scale + row * groups;
            const float* sum = t.q.sum + row * groups;
            Vec acc = zero();
            for (int g = 0; g < groups; ++g, w += Format::kGroupBytes, x += kGroup) {
                const Vec d = load_f16(reinterpret_cast<const uint16_t*>(w));
                const Vec products = to_float(group_sums<Format>(w + Format::kScaleBytes, x));
                acc = fma(mul(products, set1(scale[g])), d, acc);
                if (Format::kHasMinimum)
                    acc = fma(set1(sum[g]), load_f16(reinterpret_cast<const uint16_t*>(w) + kLanes), acc);
                else if (Format::kNibbles)
                    acc = fma(set1(sum[g]), mul(d, set1(-8.0f)), acc);
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
