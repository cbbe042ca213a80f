// The epilogue on planes that are transformed back: [tile][channel], or [tiles of a line][channel].
#pragma once

#include "common/epilogue.cuh"
#include "fft/fourier.cuh"

// Terms of kCount planes from number `first` on, as far as there are so many `planes`, of kTiles tiles of one image
// each; found by kThreads threads.
template <int kThreads, int kTiles, int kCount>
__device__ __forceinline__ void find_terms(ChannelTerms (&terms)[kCount], const Epilogue& epilogue, int first,
                                           int planes, const TiledTensor& tiled) {
  for (int i = threadIdx.x; i < kCount && first + i < planes; i += kThreads) {
    const int tiles = (first + i) / tiled.channels, channel = first + i - tiles * tiled.channels.by;
    terms[i] = channel_terms(epilogue, tiled.grid.place(tiles * kTiles).image, channel, tiled.channels.by);
  }
}

// The result, not rounded, of the sum of an element of a tensor that has some.
__device__ __forceinline__ EpilogueNumber finish_element(EpilogueNumber sum, const ChannelTerms& terms,
                                                         const Epilogue& epilogue, int at) {
  EpilogueNumber residual = 0, saved = 0;
  if constexpr (kHasResidual) residual = convert<EpilogueNumber>(epilogue.residual[at]);
  if constexpr (kHasSaved) saved = convert<EpilogueNumber>(epilogue.saved[at]);
  return finish(sum, terms, residual, saved, epilogue);
}
