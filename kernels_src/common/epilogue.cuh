// The epilogue of a fused convolution: what is done to a sum before it is rounded and written as a result.
//
//     v = alpha * sum, * scale[k], + bias[k], + channel_bias[n, k], + beta * residual, activation, + beta * residual
//     v = (alpha * sum + beta * residual) * derivative(saved)
//
// in EPILOGUE_NUMBER, in this order; the residual comes before the activation or after it. Whoever writes results
// applies it, whoever writes partial sums does not. The definitions are `activated` and `differentiated` of
// miofind/reference/epilogue.py. NaN stays NaN, as comparisons with NaN are false.
// Defines, as miofind/solver/epilogue.py gives them: EPILOGUE, EPILOGUE_NUMBER (float32, float64), EPILOGUE_ELEMENT (of
// results, channel_bias, residual and saved), EPILOGUE_PARAMETER (of scale and bias), EPILOGUE_SCALE, EPILOGUE_BIAS,
// EPILOGUE_CHANNEL_BIAS (0, 1), EPILOGUE_RESIDUAL (0 for none, 1 before, 2 after the activation), EPILOGUE_ACTIVATION,
// EPILOGUE_STATISTICS, EPILOGUE_BIAS_GRADIENT (0, 1: results or dy are summed up besides; alone they change none),
// EPILOGUE_DERIVATIVE (none, or of backward data).
#pragma once

#include "common/activation.cuh"
#include "common/types.cuh"

enum class Activation { none, relu, clamp, leaky_relu, silu, gelu, gelu_tanh, hardswish, sigmoid, tanh, elu, mish };

constexpr Activation kActivation = Activation::EPILOGUE_ACTIVATION;
constexpr Activation kDerivative = Activation::EPILOGUE_DERIVATIVE;
constexpr bool kHasScale = EPILOGUE_SCALE;
constexpr bool kHasBias = EPILOGUE_BIAS;
constexpr bool kHasChannelBias = EPILOGUE_CHANNEL_BIAS;
constexpr bool kHasResidual = EPILOGUE_RESIDUAL != 0;
constexpr bool kResidualAfter = EPILOGUE_RESIDUAL == 2;
constexpr bool kChangesResults = kHasScale || kHasBias || kHasChannelBias || kHasResidual ||
                                 kActivation != Activation::none || !(EPILOGUE_STATISTICS || EPILOGUE_BIAS_GRADIENT);
constexpr bool kHasSaved = kDerivative != Activation::none;

using EpilogueNumber = EPILOGUE_NUMBER;
using EpilogueElement = EPILOGUE_ELEMENT;
using EpilogueParameter = EPILOGUE_PARAMETER;

// Whether results are rounded to 16 bits from float32.
constexpr bool kIsShort = sizeof(EpilogueElement) == 2 && sizeof(EpilogueNumber) == 4;

// first, second: clamp's bounds; first: the slope of leaky_relu, elu's alpha.
struct Epilogue {
  const EpilogueParameter* scale;       // [k]
  const EpilogueParameter* bias;        // [k]
  const EpilogueElement* channel_bias;  // [n, k]
  const EpilogueElement* residual;      // as the output
  const EpilogueElement* saved;         // as the output
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
  const T small = exp_of(v < 0 ? v : -v);
  return (v < 0 ? small : T(1)) / (T(1) + small);
}

// sigmoid(v) and 1 - sigmoid(v), which does not cancel.
template <typename T>
__device__ __forceinline__ void sigmoids_of(T v, T& sigmoid, T& rest) {
  T small, larger;
  if constexpr (kIsShort) {
    small = __expf(-fabsf(v));
    larger = __fdividef(T(1), T(1) + small);
  } else {
    small = exp_of(v < 0 ? v : -v);
    larger = T(1) / (T(1) + small);
  }
  sigmoid = v < 0 ? small * larger : larger;
  rest = v < 0 ? larger : small * larger;
}

// v * factor, 0 where the factor is 0: minus infinity goes to 0 as the large negative numbers before it do.
template <typename T>
__device__ __forceinline__ T times(T v, T factor) {
  return factor == 0 ? T(0) : v * factor;
}

template <typename T>
__device__ __forceinline__ T activation_of(T v, T first, T second) {
  if constexpr (kActivation == Activation::relu) return at_least(v, T(0));
  if constexpr (kActivation == Activation::clamp) return at_least(at_most(v, second), first);
  if constexpr (kActivation == Activation::leaky_relu) return v < 0 ? first * v : v;
  if constexpr (kActivation == Activation::silu) {
    if constexpr (kIsShort) return short_silu(v);
    return times(v, sigmoid_of(v));
  }
  if constexpr (kActivation == Activation::gelu) {
    if constexpr (kIsShort) return short_gelu<EpilogueElement>(v);
    return times(v, T(0.5) * erfc(v * T(-0.70710678118654752440)));
  }
  if constexpr (kActivation == Activation::gelu_tanh) {
    if constexpr (kIsShort) return short_gelu_tanh(v);
    const T cubic = v + T(0.044715) * v * v * v;
    return times(v, sigmoid_of(T(1.59576912160573071176) * cubic));  // (1 + tanh(u)) / 2 = sigmoid(2 u)
  }
  if constexpr (kActivation == Activation::hardswish) return at_least(v, T(-3)) * saturated((v + T(3)) * T(1.0 / 6));
  if constexpr (kActivation == Activation::sigmoid) return kIsShort ? short_sigmoid(v) : sigmoid_of(v);
  if constexpr (kActivation == Activation::tanh) return kIsShort ? short_tanh(v) : tanh(v);
  if constexpr (kActivation == Activation::elu) return v < 0 ? first * (kIsShort ? short_expm1(v) : expm1(v)) : v;
  if constexpr (kActivation == Activation::mish) {
    if constexpr (kIsShort) return short_mish(v);
    // tanh(log(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2); by small = exp(-|v|) without overflow.
    const T small = exp_of(v < 0 ? v : -v);
    const T top = v < 0 ? small * (small + 2) : T(1) + 2 * small;
    const T bottom = v < 0 ? top + 2 : top + 2 * small * small;
    return times(v, top / bottom);
  }
  return v;
}

// v * the derivative at `saved`. Masks choose, so that 0 takes the place of whatever v is; relu, clamp and hardswish
// keep v where saved is NaN, leaky_relu multiplies by its slope there. Infinities of `saved` give the limit.
template <typename T>
__device__ __forceinline__ T times_derivative(T v, T saved, T first, T second) {
  if constexpr (kDerivative == Activation::relu) return saved <= 0 ? T(0) : v;
  if constexpr (kDerivative == Activation::clamp) return saved <= first || saved >= second ? T(0) : v;
  if constexpr (kDerivative == Activation::leaky_relu) return saved > 0 ? v : v * first;
  if constexpr (kDerivative == Activation::hardswish)
    return saved <= -3 ? T(0) : saved < 3 ? v * ((saved + T(1.5)) * T(1.0 / 3)) : v;  // 0 at -1.5, as in exact numbers
  if constexpr (kDerivative == Activation::silu) {
    T sigmoid, rest;
    sigmoids_of(saved, sigmoid, rest);
    return times(v, times(T(1) + times(saved, rest), sigmoid));
  }
  if constexpr (kDerivative == Activation::gelu_tanh) {
    const T square = saved * saved;
    T sigmoid, rest;
    sigmoids_of(T(1.59576912160573071176) * (saved + T(0.044715) * square * saved), sigmoid, rest);
    const T inner = saved * (T(1.59576912160573071176) + T(3 * 0.044715 * 1.59576912160573071176) * square);
    return times(v, times(T(1) + times(inner, rest), sigmoid));
  }
  if constexpr (kDerivative == Activation::gelu) {
    const T below = T(0.5) * erfc(saved * T(-0.70710678118654752440));
    return times(v, below + times(saved, T(0.39894228040143267794) * exp_of(T(-0.5) * saved * saved)));
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

// Bits of a channel's scale and bias, read ahead: what reads terms of the same 32 bytes later, in whichever warp of the
// block, then finds them in the L1 cache. A kernel that reads them where it needs them waits for memory there.
struct TermsAhead {
  unsigned scale, bias;
};

template <typename T>
__device__ __forceinline__ unsigned bits_at(const T* at) {
  if constexpr (sizeof(T) == 2) return *reinterpret_cast<const unsigned short*>(at);
  return *reinterpret_cast<const unsigned*>(at);  // of 64 bits the lower half
}

__device__ __forceinline__ TermsAhead read_terms_ahead(const Epilogue& epilogue, int64 channel) {
  TermsAhead ahead = {};
  if constexpr (kHasScale) ahead.scale = bits_at(epilogue.scale + channel);
  if constexpr (kHasBias) ahead.bias = bits_at(epilogue.bias + channel);
  return ahead;
}

// Has the compiler keep loads of which nothing else is used: for one pattern of bits, a NaN, time passes.
__device__ __forceinline__ void keep_terms_ahead(const TermsAhead& ahead) {
  const auto keep = [](unsigned bits) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %0, 0x7fff;\n@p nanosleep.u32 0;\n}" ::"r"(bits));
  };
  if constexpr (kHasScale) keep(ahead.scale);
  if constexpr (kHasBias) keep(ahead.bias);
}

// How many neighbouring channels' scale, or bias, one read ahead brings.
constexpr int kTermsAhead = 32 / sizeof(EpilogueParameter);

// What the activation or the derivative is applied to.
__device__ __forceinline__ EpilogueNumber argument_of(EpilogueNumber sum, const ChannelTerms& terms,
                                                      EpilogueNumber residual, const Epilogue& epilogue) {
  EpilogueNumber v = epilogue.alpha * sum;
  if constexpr (kHasScale) v *= terms.scale;
  if constexpr (kHasBias) v += terms.bias;
  if constexpr (kHasChannelBias) v += terms.channel_bias;
  if constexpr (kHasResidual && !kResidualAfter) v += epilogue.beta * residual;
  return v;
}

// The result of a sum, not rounded yet; `residual` and `saved` mean nothing without one.
__device__ __forceinline__ EpilogueNumber finish(EpilogueNumber sum, const ChannelTerms& terms, EpilogueNumber residual,
                                                 EpilogueNumber saved, const Epilogue& epilogue) {
  if constexpr (!kChangesResults) return sum;
  EpilogueNumber v = argument_of(sum, terms, residual, epilogue);
  if constexpr (kHasSaved) return times_derivative(v, saved, epilogue.first, epilogue.second);
  v = activation_of(v, epilogue.first, epilogue.second);
  if constexpr (kResidualAfter) v += epilogue.beta * residual;
  return v;
}

// The same of a forward convolution, or of a gradient that is multiplied by no derivative.
__device__ __forceinline__ EpilogueNumber finish(EpilogueNumber sum, const ChannelTerms& terms, EpilogueNumber residual,
                                                 const Epilogue& epilogue) {
  return finish(sum, terms, residual, EpilogueNumber(0), epilogue);
}

// The same in place of two sums, by one reciprocal where the activation takes one: for kernels whose warps all finish
// at once. Where other warps compute meanwhile, its more instructions cost more than the reciprocal.
__device__ __forceinline__ void finish_pair(EpilogueNumber& first, EpilogueNumber& second,
                                            const ChannelTerms& first_terms, const ChannelTerms& second_terms,
                                            const EpilogueNumber (&residual)[2], const EpilogueNumber (&saved)[2],
                                            const Epilogue& epilogue) {
  constexpr bool kIsSilu = kActivation == Activation::silu;
  if constexpr (kIsShort && (kIsSilu || kActivation == Activation::gelu_tanh)) {
    float v[2] = {argument_of(first, first_terms, residual[0], epilogue),
                  argument_of(second, second_terms, residual[1], epilogue)};
    short_gate_pair(v, kIsSilu ? short_silu_gate(v[0]) : short_gelu_tanh_gate(v[0]),
                    kIsSilu ? short_silu_gate(v[1]) : short_gelu_tanh_gate(v[1]));
    first = kResidualAfter ? v[0] + epilogue.beta * residual[0] : v[0];
    second = kResidualAfter ? v[1] + epilogue.beta * residual[1] : v[1];
  } else {
    first = finish(first, first_terms, residual[0], saved[0], epilogue);
    second = finish(second, second_terms, residual[1], saved[1], epilogue);
  }
}

// The result of the sum of output element `at` in memory, of an image's output channel; reads all that it needs.
__device__ __forceinline__ EpilogueNumber finish_at(EpilogueNumber sum, const Epilogue& epilogue, int64 image,
                                                    int64 channel, int64 channels, int64 at) {
  EpilogueNumber residual = 0, saved = 0;
  if constexpr (kHasResidual) residual = convert<EpilogueNumber>(epilogue.residual[at]);
  if constexpr (kHasSaved) saved = convert<EpilogueNumber>(epilogue.saved[at]);
  return finish(sum, channel_terms(epilogue, image, channel, channels), residual, saved, epilogue);
}
