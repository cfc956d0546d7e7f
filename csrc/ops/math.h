// Elementary functions in the vocabulary of sixteen lanes. Include one of simd/*.h first.
#pragma once

#include "types.h"

namespace {

// e^x, relative error below 2e-7. 0 below -87.33 (so exp(-inf) == 0), e^88.7 above 88.7; NaN stays NaN.
inline Vec exp(Vec x) {
    const Vec low = set1(-87.33f);
    const Mask vanishes = less(x, low);
    // max and min return their second argument if one is NaN
    Vec y = min(set1(88.7f), max(low, x));
    const IVec n = round_to_int(mul(y, set1(1.44269504f)));  // y = n ln 2 + r, |r| <= ln 2 / 2
    const Vec nf = to_float(n);
    Vec r = fnma(nf, set1(0x1.62e4p-1f), y);  // ln 2, first 15 bits: nf * this is exact
    r = fnma(nf, set1(1.42860677e-6f), r);    // the rest of ln 2
    Vec p = set1(0.00139411608f);             // interpolates e^r at 7 Chebyshev nodes, error 2.6e-9
    p = fma(p, r, set1(0.00837516829f));
    p = fma(p, r, set1(0.0416663523f));
    p = fma(p, r, set1(0.16666415f));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.00000004f));
    p = fma(p, r, set1(1.0f));
    return select(vanishes, zero(), mul(p, pow2(n)));
}

inline Vec sigmoid(Vec x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

// Absolute error below 2e-7. From 20 on it is 1: exp would overflow at 44.
inline Vec tanh(Vec x) {
    const Vec e = exp(min(set1(40.0f), add(x, x)));
    return div(sub(e, set1(1.0f)), add(e, set1(1.0f)));
}

// The share of a standard normal distribution beyond |x|: erfc(|x| / sqrt(2)) / 2, absolute error below 1e-7
// (Abramowitz, Stegun 1964, 7.1.26). NaN stays NaN.
inline Vec normal_tail(Vec x) {
    const Vec z = mul(select(less(x, zero()), sub(zero(), x), x), set1(0.707106781f));
    const Vec t = div(set1(1.0f), fma(z, set1(0.3275911f), set1(1.0f)));
    Vec p = set1(0.5f * 1.061405429f);
    p = fma(p, t, set1(0.5f * -1.453152027f));
    p = fma(p, t, set1(0.5f * 1.421413741f));
    p = fma(p, t, set1(0.5f * -0.284496736f));
    p = fma(p, t, set1(0.5f * 0.254829592f));
    return mul(mul(p, t), exp(sub(zero(), mul(z, z))));
}

// Up to 15 floats at the end of an array; the other lanes are `fill`.
inline Vec load_tail(const float* p, int n, float fill) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = i < n ? p[i] : fill;
    return load(lanes);
}
inline void store_tail(float* p, int n, Vec x) {
    float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

}  // namespace
