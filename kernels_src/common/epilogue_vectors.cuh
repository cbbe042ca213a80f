// The epilogue on vectors of neighbouring output channels, as channels-last kernels write them.
#pragma once

#include "common/epilogue.cuh"

// kCount neighbours in memory, aligned to as many or to 16 bytes, as numbers.
template <int kCount, typename T>
__device__ __forceinline__ void read_numbers(EpilogueNumber (&numbers)[kCount], const T* from) {
  constexpr int kMost = 16 / sizeof(T), kAtOnce = kCount < kMost ? kCount : kMost;
  static_assert(kCount % kAtOnce == 0, "numbers are read in whole vectors");
#pragma unroll
  for (int i = 0; i < kCount; i += kAtOnce) {
    const auto vector = *reinterpret_cast<const Vector<T, kAtOnce>*>(from + i);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) numbers[i + k] = convert<EpilogueNumber>(vector.at[k]);
  }
}

// Terms of kCount neighbouring channels from `channel` on, all of which exist; kCount divides `channel` and `channels`.
template <int kCount>
__device__ __forceinline__ void read_terms(ChannelTerms (&terms)[kCount], const Epilogue& epilogue, int64 image,
                                           int64 channel, int64 channels) {
  EpilogueNumber scale[kCount], bias[kCount], channel_bias[kCount];
  if constexpr (kHasScale) read_numbers(scale, epilogue.scale + channel);
  if constexpr (kHasBias) read_numbers(bias, epilogue.bias + channel);
  if constexpr (kHasChannelBias) read_numbers(channel_bias, epilogue.channel_bias + (image * channels + channel));
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    terms[i] = {kHasScale ? scale[i] : 1, kHasBias ? bias[i] : 0, kHasChannelBias ? channel_bias[i] : 0};
}

// kCount elements of the residual from `at` on; nothing is read without one, or unless `exists`.
template <int kCount>
__device__ __forceinline__ Vector<EpilogueElement, kCount> read_residual(const EpilogueElement* at, bool exists) {
  Vector<EpilogueElement, kCount> elements = {};
  if constexpr (kHasResidual)
    if (exists) elements = *reinterpret_cast<const Vector<EpilogueElement, kCount>*>(at);
  return elements;
}

// kCount elements of what was saved from `at` on; nothing is read without it, or unless `exists`.
template <int kCount>
__device__ __forceinline__ Vector<EpilogueElement, kCount> read_saved(const EpilogueElement* at, bool exists) {
  Vector<EpilogueElement, kCount> elements = {};
  if constexpr (kHasSaved)
    if (exists) elements = *reinterpret_cast<const Vector<EpilogueElement, kCount>*>(at);
  return elements;
}

// Results of neighbouring channels' sums, rounded.
template <int kCount>
__device__ __forceinline__ Vector<EpilogueElement, kCount> finished(const EpilogueNumber (&sums)[kCount],
                                                                    const ChannelTerms (&terms)[kCount],
                                                                    const Vector<EpilogueElement, kCount>& residual,
                                                                    const Vector<EpilogueElement, kCount>& saved,
                                                                    const Epilogue& epilogue) {
  Vector<EpilogueElement, kCount> results;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    results.at[i] = convert<EpilogueElement>(finish(sums[i], terms[i], convert<EpilogueNumber>(residual.at[i]),
                                                    convert<EpilogueNumber>(saved.at[i]), epilogue));
  return results;
}

// The same of a forward convolution.
template <int kCount>
__device__ __forceinline__ Vector<EpilogueElement, kCount> finished(const EpilogueNumber (&sums)[kCount],
                                                                    const ChannelTerms (&terms)[kCount],
                                                                    const Vector<EpilogueElement, kCount>& residual,
                                                                    const Epilogue& epilogue) {
  return finished(sums, terms, residual, Vector<EpilogueElement, kCount>{}, epilogue);
}
