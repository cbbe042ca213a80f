// The epilogue of a fused convolution: what is done to a sum before it is rounded and written as a result.
//
//     v = alpha * sum, * scale[k], + bias[k], + channel_bias[n, k], + beta * residual, activation, + beta * residual
//
// in EPILOGUE_NUMBER, in this order; the residual comes before the activation or after it. Whoever writes results
// applies it, whoever writes partial sums does not. The definition of each activation is `activated` of
// miofind/reference.py. NaN stays NaN, as comparisons with NaN are false.
// Defines, as miofind/solver/epilogue.py gives them: EPILOGUE, EPILOGUE_NUMBER (float32, float64), EPILOGUE_ELEMENT (of
// results, channel_bias and residual), EPILOGUE_PARAMETER (of scale and bias), EPILOGUE_SCALE, EPILOGUE_BIAS,
// EPILOGUE_CHANNEL_BIAS (0, 1), EPILOGUE_RESIDUAL (0 for none, 1 before, 2 after the activation), EPILOGUE_ACTIVATION.
#pragma once

#include "common/types.cuh"

enum class Activation { none, relu, clamp, leaky_relu, silu, gelu, gelu_tanh, hardswish, sigmoid, tanh, elu, mish };

constexpr Activation kActivation = Activation::EPILOGUE_ACTIVATION;
constexpr bool kHasScale = EPILOGUE_SCALE;
constexpr bool kHasBias = EPILOGUE_BIAS;
constexpr bool kHasChannelBias = EPILOGUE_CHANNEL_BIAS;
constexpr bool kHasResidual = EPILOGUE_RESIDUAL != 0;
constexpr bool kResidualAfter = EPILOGUE_RESIDUAL == 2;

using EpilogueNumber = EPILOGUE_NUMBER;
using EpilogueElement = EPILOGUE_ELEMENT;
using EpilogueParameter = EPILOGUE_PARAMETER;

// first, second: clamp's bounds; first: the slope of leaky_relu, elu's alpha.
struct Epilogue {
  const EpilogueParameter* scale;       // [k]
  const EpilogueParameter* bias;        // [k]
  const EpilogueElement* channel_bias;  // [n, k]
  const EpilogueElement* residual;      // as the output
  EpilogueNumber alpha, beta, first, second;
};

__device__ __forceinline__ float exp_of(float v) {
  return expf(v);
}
__device__ __forceinline__ double exp_of(double v) {
  return exp(v);
}

// 1 / (1 + exp(-v)): the exponential is of a number that is not positive, the divisor between 1 and 2.
template <typename T>
__device__ __forceinline__ T sigmoid_of(T v) {
  if constexpr (sizeof(T) == 4 && sizeof(EpilogueElement) == 2) {  // errors of 2^-21 do not show in 16 bits
    const T small = __expf(-fabsf(v));
    return __fdividef(v < 0 ? small : T(1), T(1) + small);
  } else {
    const T small = exp_of(v < 0 ? v : -v);
    return (v < 0 ? small : T(1)) / (T(1) + small);
  }
}

// v * factor, 0 where the factor is 0: minus infinity goes to 0 as the large negative numbers before it do.
template <typename T>
__device__ __forceinline__ T times(T v, T factor) {
  return factor == 0 ? T(0) : v * factor;
}

// v * erfc(-v / sqrt(2)) / 2. For 16 bits erfc(z) = t * exp(-z^2 + polynomial(t)), t = 1 / (1 + z / 2), to 1.2e-7 of
// its value for z >= 0. Source: Press et al., Numerical Recipes in C, section 6.2, erfcc.
template <typename T>
__device__ __forceinline__ T gelu_of(T v) {
  if constexpr (sizeof(T) == 4 && sizeof(EpilogueElement) == 2) {
    const T z = fabsf(v) * 0.70710678f, t = __fdividef(1.0f, 1.0f + 0.5f * z);
    T polynomial = 0.17087277f;
    polynomial = polynomial * t - 0.82215223f;
    polynomial = polynomial * t + 1.48851587f;
    polynomial = polynomial * t - 1.13520398f;
    polynomial = polynomial * t + 0.27886807f;
    polynomial = polynomial * t - 0.18628806f;
    polynomial = polynomial * t + 0.09678418f;
    polynomial = polynomial * t + 0.37409196f;
    polynomial = polynomial * t + 1.00002368f;
    polynomial = polynomial * t - 1.26551223f;
    const T below = times(v, 0.5f * t * __expf(polynomial - z * z));
    return v < 0 ? below : v - below;
  } else {
    return times(v, T(0.5) * erfc(v * T(-0.70710678118654752440)));
  }
}

template <typename T>
__device__ __forceinline__ T activation_of(T v, T first, T second) {
  if constexpr (kActivation == Activation::relu) return v < 0 ? T(0) : v;
  if constexpr (kActivation == Activation::clamp) return v < first ? first : v > second ? second : v;
  if constexpr (kActivation == Activation::leaky_relu) return v < 0 ? first * v : v;
  if constexpr (kActivation == Activation::silu) return times(v, sigmoid_of(v));
  if constexpr (kActivation == Activation::gelu) return gelu_of(v);
  if constexpr (kActivation == Activation::gelu_tanh) {
    const T cubic = v + T(0.044715) * v * v * v;
    return times(v, sigmoid_of(T(1.59576912160573071176) * cubic));  // (1 + tanh(u)) / 2 = sigmoid(2 u)
  }
  if constexpr (kActivation == Activation::hardswish) {
    const T shifted = v + T(3);
    return times(v, (shifted < 0 ? T(0) : shifted > 6 ? T(6) : shifted) * T(1.0 / 6));
  }
  if constexpr (kActivation == Activation::sigmoid) return sigmoid_of(v);
  if constexpr (kActivation == Activation::tanh) return tanh(v);
  if constexpr (kActivation == Activation::elu) return v < 0 ? first * expm1(v) : v;
  if constexpr (kActivation == Activation::mish) {
    // tanh(log(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2); by small = exp(-|v|) without overflow.
    const T small = exp_of(v < 0 ? v : -v);
    const T top = v < 0 ? small * (small + 2) : T(1) + 2 * small;
    const T bottom = v < 0 ? top + 2 : top + 2 * small * small;
    return times(v, top / bottom);
  }
  return v;
}

// Scale and summands of one output channel of one image.
struct ChannelTerms {
  EpilogueNumber scale, bias, channel_bias;
};

__device__ __forceinline__ ChannelTerms channel_terms(const Epilogue& epilogue, int64 image, int64 channel,
                                                      int64 channels) {
  ChannelTerms terms = {1, 0, 0};
  if constexpr (kHasScale) terms.scale = convert<EpilogueNumber>(epilogue.scale[channel]);
  if constexpr (kHasBias) terms.bias = convert<EpilogueNumber>(epilogue.bias[channel]);
  if constexpr (kHasChannelBias)
    terms.channel_bias = convert<EpilogueNumber>(epilogue.channel_bias[image * channels + channel]);
  return terms;
}

// The result of a sum, not rounded yet; `residual` means nothing without one.
__device__ __forceinline__ EpilogueNumber finish(EpilogueNumber sum, const ChannelTerms& terms, EpilogueNumber residual,
                                                 const Epilogue& epilogue) {
  EpilogueNumber v = epilogue.alpha * sum;
  if constexpr (kHasScale) v *= terms.scale;
  if constexpr (kHasBias) v += terms.bias;
  if constexpr (kHasChannelBias) v += terms.channel_bias;
  if constexpr (kHasResidual && !kResidualAfter) v += epilogue.beta * residual;
  v = activation_of(v, epilogue.first, epilogue.second);
  if constexpr (kResidualAfter) v += epilogue.beta * residual;
  return v;
}

// The result of the sum of output element `at` in memory, of an image's output channel; reads all that it needs.
__device__ __forceinline__ EpilogueNumber finish_at(EpilogueNumber sum, const Epilogue& epilogue, int64 image,
                                                    int64 channel, int64 channels, int64 at) {
  EpilogueNumber residual = 0;
  if constexpr (kHasResidual) residual = convert<EpilogueNumber>(epilogue.residual[at]);
  return finish(sum, channel_terms(epilogue, image, channel, channels), residual, epilogue);
}
