// Scale and summands of the results that a fused kernel of minimal filtering stores at once.
#pragma once

#include "common/epilogue_vectors.cuh"

// Of kCount neighbouring channels from `channel` on where they are last, else of as many columns of one channel.
template <bool kLast, int kCount>
__device__ __forceinline__ void stored_terms(ChannelTerms (&terms)[kCount], const Epilogue& epilogue, int image,
                                             int channel, int channels) {
  if constexpr (kLast) {
    read_terms(terms, epilogue, image, channel, channels);
  } else {
    const ChannelTerms all = channel_terms(epilogue, image, channel, channels);
#pragma unroll
    for (int i = 0; i < kCount; ++i) terms[i] = all;
  }
}
