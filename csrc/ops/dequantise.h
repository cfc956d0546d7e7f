// One row of a packed matrix back to float32, for embeddings and for unpack. Include one of simd/*.h first.
#pragma once

#include "types.h"

namespace {

inline float read_half(const uint8_t* p) {
    uint16_t lanes[kLanes] = {};
    __builtin_memcpy(lanes, p, 2);
    float out[kLanes];
    store(out, load_f16(lanes));
    return out[0];
}

// Equals the file's values bit for bit: d * q is exact in float32, so only the minimum's addition rounds.
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
    for (int g = 0; g < w.cols / octavo::kGroup; ++g, out += octavo::kGroup) {
        const float d = read_half(p + 2 * lane);
        p += 2 * kLanes;
        if (w.kind == WeightKind::kInt8) {
            const int8_t* q = reinterpret_cast<const int8_t*>(p);
            for (int k = 0; k < octavo::kGroup; ++k)
                out[k] = d * static_cast<float>(q[(k / 4 * kLanes + lane) * 4 + k % 4]);
            p += octavo::kGroup * kLanes;
            continue;
        }
        float m = -8.0f * d;
        if (w.kind == WeightKind::kInt4) {
            m = read_half(p + 2 * lane);
            p += 2 * kLanes;
        }
        for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < 4; ++j) {
                const int byte = p[(i * kLanes + lane) * 4 + j];
                out[4 * i + j] = d * static_cast<float>(byte & 15) + m;
                out[16 + 4 * i + j] = d * static_cast<float>(byte >> 4) + m;
            }
        }
        p += octavo::kGroup * kLanes / 2;
    }
}

}  // namespace
