// One row of a packed matrix back to float32, for embeddings and for unpack. Include one of simd/*.h first.
#pragma once

#include "stored_integer.h"

namespace {

inline float read_half(const uint8_t* p) {
    uint16_t lanes[kLanes] = {};
    __builtin_memcpy(lanes, p, 2);
    float out[kLanes];
    store(out, load_f16(lanes));
    return out[0];
}

// The number of one lane, of f16 scales alone or times a sub-scale.
inline float scale_in(const uint8_t* halves, int lane, const uint8_t* sub) {
    const float f16 = read_half(halves + 2 * lane);
    return sub ? f16 * static_cast<float>(static_cast<int8_t>(sub[lane])) : f16;
}

// Equals the file's values bit for bit: d * q is exact in float32, so only the minimum's addition rounds.
template <octavo::WeightKind Kind>
void dequantise_integers(const octavo::Matrix& w, const uint8_t* panel, int lane, float* out) {
    using Format = IntFormat<Kind>;
    constexpr int kPartK = octavo::kGroup / Format::kParts;
    for (int g = 0; g < w.cols / octavo::kGroup; ++g, out += octavo::kGroup) {
        const PackedGroup at = group_at<Kind>(panel, g);
        const uint8_t* halves = Format::kTwoLevel ? at.header : at.group;
        for (int part = 0; part < Format::kParts; ++part) {
            const uint8_t* sub = Format::kTwoLevel ? at.group + part * kLanes : nullptr;
            float d = scale_in(halves, lane, sub);
            if (Kind == octavo::WeightKind::kInt8K) d *= 0.125f;
            float m = -8.0f * d;
            if (Format::kHasMinimum) m = scale_in(halves + 2 * kLanes, lane, sub ? sub + Format::kParts * kLanes : sub);
            for (int k = part * kPartK; k < (part + 1) * kPartK; ++k) {
                const float product =
                    d * static_cast<float>(stored_integer<Kind>(at.group + Format::kScaleBytes, k, lane));
                out[k] = Format::kHasOffset ? product + m : product;
            }
        }
    }
}

void dequantise_row(const octavo::Matrix& w, int row, float* out) {
    using octavo::WeightKind;
    const int lane = row % kLanes;
    const uint8_t* p = w.data + static_cast<size_t>(row / kLanes) * w.panel_stride;
    if (w.kind == WeightKind::kF32) {
        for (int k = 0; k < w.cols; ++k) out[k] = reinterpret_cast<const float*>(p)[k * kLanes + lane];
        return;
    }
    if (w.kind == WeightKind::kF16 || w.kind == WeightKind::kBf16) {
        const uint16_t* words = reinterpret_cast<const uint16_t*>(p);
        const bool pairs = w.kind == WeightKind::kBf16;
        for (int k = 0; k < w.cols; k += kLanes) {
            uint16_t lanes[kLanes] = {};
            const int n = w.cols - k < kLanes ? w.cols - k : kLanes;
            for (int i = 0; i < n; ++i)
                lanes[i] = words[pairs ? ((k + i) / 2 * kLanes + lane) * 2 + (k + i) % 2 : (k + i) * kLanes + lane];
            const Vec x = pairs ? load_bf16(lanes) : load_f16(lanes);
            float floats[kLanes];
            store(floats, x);
            for (int i = 0; i < n; ++i) out[k + i] = floats[i];
        }
        return;
    }
    switch (w.kind) {
        case WeightKind::kInt8:
            return dequantise_integers<WeightKind::kInt8>(w, p, lane, out);
        case WeightKind::kInt4:
            return dequantise_integers<WeightKind::kInt4>(w, p, lane, out);
        case WeightKind::kInt4Z:
            return dequantise_integers<WeightKind::kInt4Z>(w, p, lane, out);
        case WeightKind::kInt5:
            return dequantise_integers<WeightKind::kInt5>(w, p, lane, out);
        case WeightKind::kInt5Z:
            return dequantise_integers<WeightKind::kInt5Z>(w, p, lane, out);
        case WeightKind::kInt2K:
            return dequantise_integers<WeightKind::kInt2K>(w, p, lane, out);
        case WeightKind::kInt3K:
            return dequantise_integers<WeightKind::kInt3K>(w, p, lane, out);
        case WeightKind::kInt4K:
            return dequantise_integers<WeightKind::kInt4K>(w, p, lane, out);
        case WeightKind::kInt5K:
            return dequantise_integers<WeightKind::kInt5K>(w, p, lane, out);
        case WeightKind::kInt6K:
            return dequantise_integers<WeightKind::kInt6K>(w, p, lane, out);
        case WeightKind::kInt8K:
            return dequantise_integers<WeightKind::kInt8K>(w, p, lane, out);
        case WeightKind::kCode4:
            return dequantise_integers<WeightKind::kCode4>(w, p, lane, out);
        case WeightKind::kCode4K:
            return dequantise_integers<WeightKind::kCode4K>(w, p, lane, out);
        default:
            return;
    }
}

}  // namespace
