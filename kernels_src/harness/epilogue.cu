// What an epilogue makes of the sums of a convolution, in double, and how far a candidate's results may be from it.
//
// The definition is `fused_results` of miofind/verify/epilogue_bounds.py, where the bound is derived; it is tested
// against it. Grid-stride with any grid and block. Defines: T (dtype name of the output, channel_bias, residual,
// saved), T_PARAMETER (of scale and bias), EPILOGUETERMS_FIELDS.
#include "common/types.cuh"

#if !defined(T) || !defined(T_PARAMETER) || !defined(EPILOGUETERMS_FIELDS)
#error "define T, T_PARAMETER and EPILOGUETERMS_FIELDS"
#endif

// In the order of miofind/core/epilogue.py.
enum Activation { kNone, kRelu, kClamp, kLeakyRelu, kSilu, kGelu, kGeluTanh, kHardswish, kSigmoid, kTanh, kElu, kMish };
enum Residual { kWithout, kBefore, kAfter };

// `count` elements; powers of two that the inputs were multiplied by, as verify_compare of verify.cu has them; alpha,
// beta and the activation's first and second number; the fields of EpilogueStandard and EpilogueNumbers; activation,
// derivative and residual as above; the output's explicit bits of the mantissa and least normal exponent; its channels,
// the places of one of them, and its strides.
struct EpilogueTerms {
  EPILOGUETERMS_FIELDS
};

__device__ __forceinline__ double sigmoid(double v) {
  const double small = exp(-fabs(v));
  return (v < 0 ? small : 1.0) / (1.0 + small);
}

// v * factor, 0 where the factor is.
__device__ __forceinline__ double times(double v, double factor) {
  return factor == 0 ? 0.0 : v * factor;
}

__device__ double activated(double v, const EpilogueTerms& of) {
  switch (of.activation) {
    case kRelu:
      return v < 0 ? 0.0 : v;
    case kClamp:
      return v < of.first ? of.first : v > of.second ? of.second : v;
    case kLeakyRelu:
      return v < 0 ? of.first * v : v;
    case kSilu:
      return times(v, sigmoid(v));
    case kGelu:
      return times(v, 0.5 * erfc(-v * 0.70710678118654752440));
    case kGeluTanh:
      return times(v, sigmoid(1.59576912160573071176 * (v + 0.044715 * v * v * v)));
    case kHardswish: {
      const double shifted = v + 3.0;
      return times(v, (shifted < 0 ? 0.0 : shifted > 6 ? 6.0 : shifted) / 6.0);
    }
    case kSigmoid:
      return sigmoid(v);
    case kTanh:
      return tanh(v);
    case kElu:
      return v < 0 ? of.first * expm1(v) : v;
    case kMish:
      return times(v, tanh(log1p(exp(-fabs(v))) + (v < 0 ? 0.0 : v)));
    default:
      return v;
  }
}

// v * the derivative at `saved`, and the sum of the magnitudes of the derivative's terms where it is inexact.
struct Differentiated {
  double result, magnitude;
};

__device__ Differentiated differentiated(double v, double saved, const EpilogueTerms& of) {
  double factor = 0, summand = 0;
  switch (of.derivative) {
    case kRelu:
      return {saved <= 0 ? 0.0 : v, 0.0};
    case kClamp:
      return {saved <= of.first || saved >= of.second ? 0.0 : v, 0.0};
    case kLeakyRelu:
      return {saved > 0 ? v : v * of.first, 0.0};
    case kHardswish:
      if (saved <= -3) return {0.0, 0.0};
      if (!(saved < 3)) return {v, 0.0};
      return {v * (saved / 3 + 0.5), fabs(saved) / 3 + 0.5};
    case kSilu:
      factor = sigmoid(saved);
      summand = times(saved, factor * sigmoid(-saved));
      break;
    case kGelu:
      factor = 0.5 * erfc(-saved * 0.70710678118654752440);
      summand = times(saved, 0.39894228040143267794 * exp(-0.5 * saved * saved));
      break;
    default: {
      const double cubic = 1.59576912160573071176 * (saved + 0.044715 * saved * saved * saved);
      const double slope = 1.59576912160573071176 * (1 + 3 * 0.044715 * saved * saved);
      factor = sigmoid(cubic);
      summand = times(saved * slope, factor * sigmoid(-cubic));
    }
  }
  return {times(v, factor + summand), factor + fabs(summand)};
}

// How large the exponent is of the exponential that an activation or a derivative multiplies by.
__device__ double exponent_of(double v, int activation) {
  if (!(v < 0)) return 0.0;
  switch (activation) {
    case kSilu:
    case kSigmoid:
    case kMish:
      return -v;
    case kGelu:
      return v * v / 2 + 0.5;
    case kGeluTanh:
      return -1.59576912160573071176 * (v + 0.044715 * v * v * v);
    default:
      return 0.0;
  }
}

// Half the spacing of the output's numbers around `value` >= 0.
__device__ __forceinline__ double half_ulp(double value, const EpilogueTerms& of) {
  const int exponent = value > 0 ? ilogb(value) : of.least_exponent;
  return scalbn(1.0, (exponent > of.least_exponent ? exponent : of.least_exponent) - of.mantissa_bits - 1);
}

template <typename Element>
__device__ __forceinline__ double read(const Element* operand, int64 at, double otherwise) {
  return operand == nullptr ? otherwise : convert<double>(operand[at]);
}

// results[i] = the epilogue of sums[i]; bounds[2 * i] = the sum of the magnitudes of all that makes it, and
// bounds[2 * i + 1] = the bound of its error before it is rounded. Listed elements, all where indices is null; sums and
// scales as reference.cu writes them, where scales may be null; null for operands that the epilogue has not.
extern "C" __global__ void epilogue_results(const int64* __restrict__ indices, const double* __restrict__ sums,
                                            const float* __restrict__ scales, const T_PARAMETER* __restrict__ scale,
                                            const T_PARAMETER* __restrict__ bias, const T* __restrict__ channel_bias,
                                            const T* __restrict__ residual, const T* __restrict__ saved,
                                            double* __restrict__ results, float* __restrict__ bounds,
                                            const __grid_constant__ EpilogueTerms of) {
  const double infinity = __longlong_as_double(0x7FF0000000000000ll);
  const int64 step = int64(gridDim.x) * blockDim.x;
  for (int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x; i < of.count; i += step) {
    const int64 index = indices == nullptr ? i : indices[i];
    const int64 image = index / of.plane / of.channels, channel = index / of.plane - image * of.channels;
    const int64 place = index - (image * of.channels + channel) * of.plane;
    const int64 at = image * of.image_stride + channel * of.channel_stride + place * of.place_stride;
    const double first = image & 1 ? of.first_odd : of.first_even;
    const double second = channel % of.second_size & 1 ? of.second_odd : of.second_even;

    double sum = sums[i] * first * second;
    const double magnitude = scales == nullptr ? fabs(sum) : scales[2 * i] * first * second;
    double spread = scales == nullptr ? 0.0 : of.factor * (scales[2 * i + 1] * first * second);
    if (of.rounds_sums) sum = convert<double>(convert<T>(sum));
    if (of.doubts_sums) spread += half_ulp(fabs(sum) + spread, of);

    const double of_channel = read(scale, channel, 1.0);
    const double added = read(bias, channel, 0.0),
                 added_to_image = read(channel_bias, image * of.channels + channel, 0.0);
    const double more = of.beta * read(residual, at, 0.0);
    const double before = of.residual == kBefore ? more : 0.0, after = of.residual == kAfter ? more : 0.0;
    const double factor = fabs(of.alpha) * fabs(of_channel);
    const double summands = fabs(added) + fabs(added_to_image) + fabs(before);

    const double v = of.alpha * sum * of_channel + added + added_to_image + before;
    spread = factor * spread + of.roundings * of.roundoff * (factor * fabs(sum) + summands);
    if (!(fabs(v) < infinity)) spread = 0;
    double result, error;
    if (of.derivative == kNone) {
      result = activated(v, of);
      const double relative = of.error + of.error_per_exponent * exponent_of(v, of.activation);
      error = of.slope * spread + (result == 0 ? 0.0 : of.roundoff * relative * fabs(result)) + of.tiny;
    } else {
      const double argument = convert<double>(saved[at]);
      const Differentiated product = differentiated(v, argument, of);
      result = product.result;
      const double relative = of.error + of.error_per_exponent * exponent_of(argument, of.derivative);
      const double largest = fabs(v) < infinity ? fabs(v) + spread : 0.0;
      error = fabs(differentiated(1.0, argument, of).result) * spread +
              of.roundoff * relative * product.magnitude * largest;
      error = (fabs(error) < infinity ? error : 0.0) + of.tiny;
    }
    const double later = of.later_roundings * of.roundoff * (fabs(result) + fabs(after));

    results[i] = result + after;
    bounds[2 * i] = static_cast<float>(factor * magnitude + summands + fabs(after));
    bounds[2 * i + 1] = __double2float_ru(error + later);
  }
}
