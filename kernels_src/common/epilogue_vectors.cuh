// The epilogue on vectors of neighbouring output channels, as channels-last kernels write them.
#pragma once

#include "common/epilogue.cuh"

// Terms of kCount neighbouring channels from `channel` on, all of which exist.
template <int kCount>
__device__ __forceinline__ void read_terms(ChannelTerms (&terms)[kCount], const Epilogue& epilogue, int64 image,
                                           int64 channel, int64 channels) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) terms[i] = channel_terms(epilogue, image, channel + i, channels);
}

// kCount elements of the residual from `at` on; nothing is read without one, or unless `exists`.
template <int kCount>
__device__ __forceinline__ Vector<EpilogueElement, kCount> read_residual(const EpilogueElement* at, bool exists) {
  Vector<EpilogueElement, kCount> elements = {};
  if constexpr (kHasResidual)
    if (exists) elements = *reinterpret_cast<const Vector<EpilogueElement, kCount>*>(at);
  return elements;
}

// Results of neighbouring channels' sums, rounded.
template <int kCount>
__device__ __forceinline__ Vector<EpilogueElement, kCount> finished(const EpilogueNumber (&sums)[kCount],
                                                                    const ChannelTerms (&terms)[kCount],
                                                                    const Vector<EpilogueElement, kCount>& residual,
                                                                    const Epilogue& epilogue) {
  Vector<EpilogueElement, kCount> results;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    results.at[i] =
        convert<EpilogueElement>(finish(sums[i], terms[i], convert<EpilogueNumber>(residual.at[i]), epilogue));
  return results;
}
