// y = epilogue(y) in place, dx for backward data: what is left to do of a fused problem whose convolution has written
// its sums, rounded.
//
// A thread takes UNROLL vectors of 16 bytes, all loaded before the first is used. WALK says what it knows of channels:
//   0  nothing, as no operand goes by channel: y is one run of elements.
//   1  channels last: a row is as many pixels as make whole vectors, [rows, columns] vectors for each of `images`; a
//      block takes rows one below the other, or, where a row is longer than a block, a part of each. The channels of a
//      thread's vectors are the same in all of its rows, and so are their terms, read once.
//   2  channels first: y is one run of planes; a vector meets two planes at most, one where IS_WHOLE.
// Grid: one dimension; WALK 1: images outermost, then rows, then parts of a row. Blocks go from y's end to its
// beginning: the L2 cache has the end still, and then the beginning for whoever reads y next. What steps before do not
// write (terms, residual, saved) is read before their end.
// Defines: WALK, IS_WHOLE (vectors divide a pixel's channels, a plane), VECTOR, UNROLL, those of common/epilogue.cuh.
#include "common/epilogue.cuh"
#include "common/pdl.cuh"

#if !defined(WALK) || !defined(IS_WHOLE) || !defined(VECTOR) || !defined(UNROLL)
#error "define WALK, IS_WHOLE, VECTOR and UNROLL"
#endif

constexpr bool kIsWhole = IS_WHOLE;
constexpr int kThreads = WALK == 1 ? 512 : 256;  // of a block; of WALK 1 at most
constexpr int kBlocks = WALK == 1 ? 1 : 2;       // of a multiprocessor: left to itself, ptxas spills to have more
using Elements = Vector<EpilogueElement, VECTOR>;
using uint64 = unsigned long long;

// A vector as it is moved: members of a structure would be moved one by one.
template <int Bytes>
struct Word;
template <>
struct Word<2> {
  using Type = unsigned short;
};
template <>
struct Word<4> {
  using Type = unsigned;
};
template <>
struct Word<8> {
  using Type = uint2;
};
template <>
struct Word<16> {
  using Type = uint4;
};
using Moved = Word<sizeof(Elements)>::Type;

__device__ __forceinline__ unsigned block_number() {
  return gridDim.x - 1 - blockIdx.x;
}

__device__ __forceinline__ Elements load(const EpilogueElement* at) {
  const Moved moved = *reinterpret_cast<const Moved*>(at);
  return *reinterpret_cast<const Elements*>(&moved);
}

__device__ __forceinline__ void store(EpilogueElement* at, const Elements& elements) {
  *reinterpret_cast<Moved*>(at) = *reinterpret_cast<const Moved*>(&elements);
}

__device__ __forceinline__ void load_residuals(Elements (&residual)[UNROLL], const Epilogue& epilogue,
                                               const int64 (&first)[UNROLL], int64 elements) {
  if constexpr (kHasResidual) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (first[u] + VECTOR <= elements) residual[u] = load(epilogue.residual + first[u]);
  }
}

__device__ __forceinline__ void load_saved(Elements (&saved)[UNROLL], const Epilogue& epilogue,
                                           const int64 (&first)[UNROLL], int64 elements) {
  if constexpr (kHasSaved) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (first[u] + VECTOR <= elements) saved[u] = load(epilogue.saved + first[u]);
  }
}

__device__ __forceinline__ void load_sums(Elements (&sums)[UNROLL], const EpilogueElement* y,
                                          const int64 (&first)[UNROLL], int64 elements) {
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
    if (first[u] + VECTOR <= elements) sums[u] = load(y + first[u]);
}

// The results of a vector whose elements' terms are given by `terms_of(element)`.
template <class TermsOf>
__device__ __forceinline__ void finish_vector(EpilogueElement* y, const Elements& sums, const Elements& residual,
                                              const Elements& saved, const Epilogue& epilogue,
                                              const TermsOf& terms_of) {
  Elements results;
#pragma unroll
  for (int e = 0; e < VECTOR; e++) {
    EpilogueNumber added = 0, argument = 0;
    if constexpr (kHasResidual) added = convert<EpilogueNumber>(residual.at[e]);
    if constexpr (kHasSaved) argument = convert<EpilogueNumber>(saved.at[e]);
    const EpilogueNumber v = finish(convert<EpilogueNumber>(sums.at[e]), terms_of(e), added, argument, epilogue);
    results.at[e] = convert<EpilogueElement>(v);
  }
  store(y, results);
}

// The elements behind the last whole vector, by the thread whose turn that vector would be; `at` counts as y does.
__device__ __forceinline__ void finish_element(EpilogueElement* y, const Epilogue& epilogue, int64 image, int64 channel,
                                               int64 channels, int64 at) {
  const EpilogueNumber sum = convert<EpilogueNumber>(y[at]);
  y[at] = convert<EpilogueElement>(finish_at(sum, epilogue, image, channel, channels, at));
}

#if WALK == 0

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    epilogue_pass(EpilogueElement* y, int64 elements, const __grid_constant__ Epilogue epilogue) {
  int64 first[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
    first[u] = ((static_cast<int64>(block_number()) * UNROLL + u) * kThreads + threadIdx.x) * VECTOR;
  Elements sums[UNROLL], residual[UNROLL], saved[UNROLL];
  load_residuals(residual, epilogue, first, elements);
  load_saved(saved, epilogue, first, elements);
  griddepcontrol_wait();
  load_sums(sums, y, first, elements);
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if (first[u] + VECTOR <= elements) {
      finish_vector(y + first[u], sums[u], residual[u], saved[u], epilogue, [](int) { return ChannelTerms{1, 0, 0}; });
    } else {
      for (int64 at = first[u]; at < elements; at++) finish_element(y, epilogue, 0, 0, 0, at);
    }
  }
}

#elif WALK == 1

// VECTOR numbers from a multiple of VECTOR on, in vectors of 16 bytes at most.
template <typename T>
__device__ __forceinline__ void load_run(EpilogueNumber (&to)[VECTOR], const T* from) {
  constexpr int kPiece = sizeof(T) * VECTOR < 16 ? VECTOR : 16 / sizeof(T);
#pragma unroll
  for (int p = 0; p < VECTOR; p += kPiece) {
    const auto piece = *reinterpret_cast<const typename Word<sizeof(T) * kPiece>::Type*>(from + p);
#pragma unroll
    for (int e = 0; e < kPiece; e++) to[p + e] = convert<EpilogueNumber>(reinterpret_cast<const T*>(&piece)[e]);
  }
}

// The terms of neighbouring channels from `first` on, beginning again behind the last one.
__device__ __forceinline__ void run_terms(ChannelTerms (&terms)[VECTOR], const Epilogue& epilogue, unsigned image,
                                          unsigned first, unsigned channels) {
  if constexpr (kIsWhole) {
    EpilogueNumber scale[VECTOR] = {}, bias[VECTOR] = {}, channel_bias[VECTOR] = {};
    if constexpr (kHasScale) load_run(scale, epilogue.scale + first);
    if constexpr (kHasBias) load_run(bias, epilogue.bias + first);
    if constexpr (kHasChannelBias)
      load_run(channel_bias, epilogue.channel_bias + static_cast<int64>(image) * channels + first);
#pragma unroll
    for (int e = 0; e < VECTOR; e++) terms[e] = {scale[e], bias[e], channel_bias[e]};
  } else {
    unsigned channel = first;
#pragma unroll
    for (int e = 0; e < VECTOR; e++) {
      terms[e] = channel_terms(epilogue, image, channel, channels);
      channel = channel + 1 == channels ? 0 : channel + 1;
    }
  }
}

// `elements` of an image, or of all as one; `columns` vectors of a row; rows side by side in a block, or parts of a
// row.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    epilogue_pass(EpilogueElement* y, int64 elements, unsigned channels, unsigned columns, unsigned rows,
                  unsigned parts, unsigned blocks, const __grid_constant__ Epilogue epilogue) {
  const unsigned image = block_number() / blocks, block = block_number() - image * blocks;
  const unsigned below = block / parts, part = block - below * parts;
  const unsigned in_rows = part * blockDim.x + threadIdx.x;  // vectors behind the first of the rows side by side
  const unsigned column = rows == 1 ? in_rows : in_rows % columns;
  if (rows == 1 && column >= columns) return;
  const int64 before = image * elements;
  const uint64 step = static_cast<uint64>(rows) * columns;
  int64 first[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
    first[u] = static_cast<int64>((static_cast<uint64>(below) * UNROLL + u) * step + in_rows) * VECTOR;
  const unsigned channel = kIsWhole ? column * VECTOR : (column * VECTOR) % channels;
  ChannelTerms terms[VECTOR];
  run_terms(terms, epilogue, image, channel, channels);
  Epilogue here = epilogue;
  if constexpr (kHasResidual) here.residual += before;
  y += before;
  Elements sums[UNROLL], residual[UNROLL];
  load_residuals(residual, here, first, elements);
  griddepcontrol_wait();
  load_sums(sums, y, first, elements);
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if (first[u] + VECTOR <= elements) {
      finish_vector(y + first[u], sums[u], residual[u], Elements{}, epilogue, [&](int e) { return terms[e]; });
    } else {
      for (int64 at = first[u]; at < elements; at++)
        finish_element(y, here, image, (channel + (at - first[u])) % channels, channels, at);
    }
  }
}

#else

// The terms of a plane; planes behind the last one have those of the last.
__device__ __forceinline__ ChannelTerms plane_terms(const Epilogue& epilogue, int64 plane, int64 planes,
                                                    unsigned channel, unsigned channels) {
  ChannelTerms terms = {1, 0, 0};
  if constexpr (kHasScale) terms.scale = convert<EpilogueNumber>(epilogue.scale[channel]);
  if constexpr (kHasBias) terms.bias = convert<EpilogueNumber>(epilogue.bias[channel]);
  if constexpr (kHasChannelBias)
    terms.channel_bias = convert<EpilogueNumber>(epilogue.channel_bias[plane < planes ? plane : planes - 1]);
  return terms;
}

// `size` elements of a plane, of which there are `planes`.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    epilogue_pass(EpilogueElement* y, int64 planes, int64 size, unsigned channels,
                  const __grid_constant__ Epilogue epilogue) {
  const int64 elements = planes * size, begin = static_cast<int64>(block_number()) * (UNROLL * kThreads * VECTOR);
  const int64 first_plane = begin / size, in_plane = begin - first_plane * size;
  const unsigned first_channel = static_cast<unsigned>(first_plane % channels);
  const bool is_small = size <= 0x7fffffff - UNROLL * kThreads * VECTOR;
  int64 first[UNROLL];
  int whole[UNROLL];  // elements of a vector before the next plane
  ChannelTerms terms[UNROLL], next_terms[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    const int in_block = (u * kThreads + static_cast<int>(threadIdx.x)) * VECTOR;
    first[u] = begin + in_block;
    const int64 behind = in_plane + in_block;
    const unsigned passed = is_small ? static_cast<unsigned>(behind) / static_cast<unsigned>(size) : behind >= size;
    const int64 plane = first_plane + passed, left = (passed + 1) * size - behind;
    whole[u] = left < VECTOR ? static_cast<int>(left) : VECTOR;
    const unsigned channel = (first_channel + passed) % channels;
    terms[u] = plane_terms(epilogue, plane, planes, channel, channels);
    if constexpr (!kIsWhole) {
      const unsigned next = channel + 1 == channels ? 0 : channel + 1;
      next_terms[u] = plane_terms(epilogue, plane + 1, planes, next, channels);
    }
  }
  Elements sums[UNROLL], residual[UNROLL];
  load_residuals(residual, epilogue, first, elements);
  griddepcontrol_wait();
  load_sums(sums, y, first, elements);
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if (first[u] + VECTOR <= elements) {
      finish_vector(y + first[u], sums[u], residual[u], Elements{}, epilogue,
                    [&](int e) { return kIsWhole || e < whole[u] ? terms[u] : next_terms[u]; });
    } else {
      for (int64 at = first[u]; at < elements; at++) {
        const int64 plane = at / size;
        finish_element(y, epilogue, plane / channels, plane % channels, channels, at);
      }
    }
  }
}

#endif
