// Planes of volumes that a block streams through shared memory while it marches along their depth.
//
// An output counts in units: forward one, with BACKWARD as many neighbours as the stride, which meet the same inputs.
// Rows and columns of a thread's units are TILE_ROWS and TILE_COLUMNS. Threads lie BLOCK_ROWS x BLOCK_COLUMNS on a
// plane, for each vector of the block's channels. A plane is staged [row][column][channel], or channels first
// [channel][row][column], where the first column is SKEW elements before the first that is met. PITCH is that of
// pixels, or channels first of rows.
#pragma once

#include "common/copy_bytes.cuh"
#include "common/divisor.cuh"
#include "common/opaque.cuh"
#include "common/tile.cuh"

#if !defined(ELEMENT) || !defined(CHANNELS_LAST) || !defined(BACKWARD)
#error "define ELEMENT, CHANNELS_LAST and BACKWARD"
#endif
#if !defined(FILTER_D) || !defined(FILTER_H) || !defined(FILTER_W) || !defined(STRIDE_D) || !defined(STRIDE_H) || \
    !defined(STRIDE_W) || !defined(DILATION_H) || !defined(DILATION_W) || !defined(PHASE_H) || !defined(PHASE_W)
#error "define FILTER_ and STRIDE_ of D, H and W, DILATION_ and PHASE_ of H and W"
#endif
#if !defined(CHANNELS) || !defined(VECTOR) || !defined(TILE_ROWS) || !defined(TILE_COLUMNS) || !defined(BLOCK_ROWS) || \
    !defined(BLOCK_COLUMNS) || !defined(STAGES) || !defined(THREADS)
#error "define CHANNELS, VECTOR, TILE_ROWS, TILE_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS, STAGES and THREADS"
#endif
#if !defined(SKEW) || !defined(PITCH) || !defined(ALIGNMENT) || !defined(READ_VECTOR) || !defined(COPY_VECTOR) || \
    !defined(OUT_VECTOR) || !defined(VOLUME_FIELDS)
#error "define SKEW, PITCH, ALIGNMENT, READ_VECTOR, COPY_VECTOR, OUT_VECTOR and VOLUME_FIELDS"
#endif

// Sizes and steps, as VOLUME of solvers/depthwise/volume_tiling.py declares them. `in` is what is staged.
struct Volume {
  VOLUME_FIELDS
};

constexpr bool kChannelsLast = CHANNELS_LAST, kBackward = BACKWARD;
constexpr int kVector = VECTOR, kStages = STAGES, kThreads = THREADS, kChannels = CHANNELS;
static_assert(kChannels % kVector == 0 && (kChannelsLast || kVector == 1), "a thread must have whole vectors");
static_assert(kStages >= 2, "one plane is computed while others are copied");

constexpr int floor_div(int a, int b) {
  return a >= 0 ? a / b : -((b - 1 - a) / b);
}

template <int kNumber>
struct Constant {
  static constexpr int value = kNumber;
};

// body(Constant<kFirst>()), ... body(Constant<kEnd - 1>()): a loop whose index is a constant.
template <int kFirst, int kEnd, typename Body>
__device__ __forceinline__ void unrolled(const Body& body) {
  if constexpr (kFirst < kEnd) {
    body(Constant<kFirst>());
    unrolled<kFirst + 1, kEnd>(body);
  }
}

// `pointer`, of which the compiler forgets all it knows, so that offsets are added to it one by one.
template <typename T>
__device__ __forceinline__ const T* opaque(const T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// Rows or columns of a thread: kUnits units.
template <int kTaps, int kStride, int kDilation, int kPhase, int kUnits>
struct Axis {
  // The first input that is met, less the first unit's own.
  static constexpr int kLead = kBackward ? floor_div(kPhase - (kTaps - 1) * kDilation, kStride) : 0;
  static constexpr int kOuts = kBackward ? kUnits * kStride : kUnits;
  static constexpr int kStep = kUnits * (kBackward ? 1 : kStride);  // inputs from one thread to the next
  static constexpr int kWindow = kBackward ? (kUnits * kStride - 1 + kPhase) / kStride - kLead + 1
                                           : (kUnits - 1) * kStride + (kTaps - 1) * kDilation + 1;

  // The input of the window that a tap joins with an output; negative if none.
  static constexpr int at(int out, int tap) {
    if (!kBackward) return out * kStride + tap * kDilation;
    const int sum = out + kPhase - tap * kDilation;
    return sum - floor_div(sum, kStride) * kStride ? -1 : floor_div(sum, kStride) - kLead;
  }
};
using Rows = Axis<FILTER_H, STRIDE_H, DILATION_H, PHASE_H, TILE_ROWS>;
using Columns = Axis<FILTER_W, STRIDE_W, DILATION_W, PHASE_W, TILE_COLUMNS>;

// Depth: iteration t meets kInPlanes inputs, which belong to units t, t - 1, ... t - kSpan + 1 of slots 0, 1, ...
constexpr int kSpan = ceil_div(FILTER_D, STRIDE_D), kInPlanes = kBackward ? 1 : STRIDE_D;
constexpr int kOutPlanes = kBackward ? STRIDE_D : 1;

// A march is a loop of kPhases iterations, after which slots lie where they lay; with one phase they are moved instead.
constexpr int kMostProducts = 1600;  // of a loop's code
constexpr int phases(int products) {
  return products * kSpan <= kMostProducts ? kSpan : 1;
}
// Where a slot lies in a phase.
template <int kPhases>
constexpr int slot_at(int phase, int slot) {
  return kPhases == 1 ? slot : (phase + kSpan - slot) % kSpan;
}
// The stage of an input of a phase; negative where it differs from one loop to the next.
template <int kPhases>
constexpr int stage_of(int phase, int in) {
  return kPhases * kInPlanes % kStages ? -1 : (phase * kInPlanes + in) % kStages;
}

// The tap that joins input `in` of an iteration with output `out` of the unit of a slot; FILTER_D or more if none.
constexpr int tap_of(int slot, int in, int out) {
  return kBackward ? STRIDE_D * (kSpan - 1 - slot) + out : STRIDE_D * slot + in;
}

// A plane in shared memory.
constexpr int kPlaneRows = Rows::kStep * (BLOCK_ROWS - 1) + Rows::kWindow;
constexpr int kPlaneColumns = round_up(Columns::kStep * (BLOCK_COLUMNS - 1) + SKEW + Columns::kWindow, ALIGNMENT);
constexpr int kPixelPitch = kChannelsLast ? PITCH : 1, kRowPitch = kChannelsLast ? kPlaneColumns * PITCH : PITCH;
constexpr int kChannelPitch = kChannelsLast ? 1 : kPlaneRows * kRowPitch;
constexpr int kPlane = round_up(kPlaneRows * kRowPitch * (kChannelsLast ? 1 : kChannels), 16);
static_assert(PITCH >= (kChannelsLast ? kChannels : kPlaneColumns), "PITCH must hold a pixel, or channels first a row");
static_assert((kChannelsLast ? kChannels : kPlaneColumns) % COPY_VECTOR == 0, "rows must have whole copies");
static_assert(!kChannelsLast || SKEW == 0, "channels last, columns lie as they are met");

// Threads: vectors of channels innermost, or channels first outermost.
constexpr int kLanes = kChannels / kVector, kPlaces = BLOCK_ROWS * BLOCK_COLUMNS;
static_assert(kThreads == round_up(kLanes * kPlaces, 32) && kThreads <= 1024, "THREADS differs from this layout");

// Where a thread computes; one that is not needed computes what the first does, for nothing.
struct Place {
  int channel, row, column;  // the first of its channels, its row and its column of threads
  bool exists;

  __device__ __forceinline__ Place() {
    const int lane = kChannelsLast ? threadIdx.x % kLanes : threadIdx.x / kPlaces;
    const int place = kChannelsLast ? threadIdx.x / kLanes : threadIdx.x % kPlaces;
    channel = lane * kVector, row = place / BLOCK_COLUMNS, column = place % BLOCK_COLUMNS;
    exists = kChannelsLast ? place < kPlaces : lane < kLanes;
    if (!exists) channel = row = column = 0;
  }
  // Elements from a staged plane's first to the window's.
  __device__ __forceinline__ int window() const {
    return channel * kChannelPitch + row * (Rows::kStep * kRowPitch) + column * (Columns::kStep * kPixelPitch);
  }
};

// How the threads of a block copy planes of a volume to shared memory. What lies outside the planes is set to zero
// once.
struct PlaneCopies {
  static constexpr int kVectors = kPlaneRows * kPlaneColumns * kChannels / COPY_VECTOR;
  static constexpr int kCount = ceil_div(kVectors, kThreads);
  static constexpr int kBytes = static_cast<int>(sizeof(ELEMENT)) * COPY_VECTOR;
  static constexpr bool kAsynchronous = kBytes >= 4;
  int from[kCount];     // elements from a plane's first; negative for none
  unsigned to[kCount];  // elements from a stage's first, or where asynchronous the address in the first stage
  ELEMENT held[kAsynchronous ? 1 : kCount];

  // Those of the block whose first channel, row and column are these.
  __device__ __forceinline__ PlaneCopies(const Volume& volume, int first_channel, int row, int column,
                                         ELEMENT* staged) {
    const int height = volume.in_size[1], width = volume.in_size[2];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int rank = threadIdx.x + i * kThreads;
      int channel, h, w;
      constexpr int kSegments = (kChannelsLast ? kChannels : kPlaneColumns) / COPY_VECTOR;
      if (kChannelsLast) {
        channel = rank % kSegments * COPY_VECTOR;
        w = rank / kSegments % kPlaneColumns, h = rank / (kSegments * kPlaneColumns);
      } else {
        w = rank % kSegments * COPY_VECTOR;
        h = rank / kSegments % kPlaneRows, channel = rank / (kSegments * kPlaneRows);
      }
      const int at = channel * kChannelPitch + h * kRowPitch + w * kPixelPitch;
      to[i] = opaque(kAsynchronous ? static_cast<int>(__cvta_generic_to_shared(staged + at)) : at);
      channel += first_channel, h += row, w += column;
      const bool exists = (i + 1) * kThreads <= kVectors || rank < kVectors;
      const bool inside =
          exists && channel < volume.channels && static_cast<unsigned>(h) < height && static_cast<unsigned>(w) < width;
      from[i] = inside ? channel * volume.in_channel + h * volume.in_row + w * volume.in_pixel : -1;
      if (exists && !inside)
#pragma unroll 1
        for (int stage = 0; stage < kStages; ++stage)
#pragma unroll
          for (int v = 0; v < COPY_VECTOR; ++v) staged[stage * kPlane + at + v] = convert<ELEMENT>(0.0f);
    }
  }

  // Starts to copy the plane that begins at `plane` to a stage.
  __device__ __forceinline__ void begin(int stage, const ELEMENT* plane) {
    plane = opaque(plane);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (from[i] >= 0) {
        if constexpr (kAsynchronous)
          copy_bytes<kBytes>(to[i] + stage * (kPlane * static_cast<int>(sizeof(ELEMENT))), plane + from[i], true);
        else
          held[i] = plane[from[i]];
      }
  }
  // Ends it, as far as threads do that.
  __device__ __forceinline__ void end(ELEMENT* staged, int stage) const {
    if constexpr (!kAsynchronous)
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (from[i] >= 0) staged[stage * kPlane + to[i]] = held[i];
  }
};

// kCount elements as floats, of which the first lies `kAt` elements behind an address of whole READ_VECTORs.
template <int kAt, int kCount>
__device__ __forceinline__ void read_columns(float* to, const ELEMENT* from) {
  if constexpr (kCount > 0) {
    constexpr int kMost = kAt == 0 ? READ_VECTOR : (kAt & -kAt) < READ_VECTOR ? (kAt & -kAt) : READ_VECTOR;
    constexpr int kFit = kCount >= 8 ? 8 : kCount >= 4 ? 4 : kCount >= 2 ? 2 : 1;
    constexpr int kRead = kFit < kMost ? kFit : kMost;
    const auto elements = *reinterpret_cast<const Vector<ELEMENT, kRead>*>(from + kAt);
#pragma unroll
    for (int i = 0; i < kRead; ++i) to[i] = convert<float>(elements.at[i]);
    read_columns<kAt + kRead, kCount - kRead>(to + kRead, from);
  }
}

// A row of a thread's window.
__device__ __forceinline__ void read_row(float (&values)[Columns::kWindow][kVector], const ELEMENT* row) {
  if constexpr (kChannelsLast) {
#pragma unroll
    for (int i = 0; i < Columns::kWindow; ++i) {
      const auto elements = *reinterpret_cast<const Vector<ELEMENT, kVector>*>(row + i * kPixelPitch);
#pragma unroll
      for (int v = 0; v < kVector; ++v) values[i][v] = convert<float>(elements.at[v]);
    }
  } else {
    read_columns<SKEW, Columns::kWindow>(&values[0][0], row);
  }
}

// A run of units along the depth of a volume, and the planes that they meet.
struct March {
  int first_in, first_out;  // coordinates of input 0 of iteration 0, and of the unit of slot 0 there
  int units, planes;

  // Units `first` to `end` of a residue class.
  __device__ __forceinline__ March(const Volume& volume, int residue, int first, int end) {
    units = end - first, planes = kBackward ? units + kSpan - 1 : STRIDE_D * (units - 1) + FILTER_D;
    first_out = volume.first_out + residue + volume.out_step * (kOutPlanes * first);
    first_in = volume.first_in + residue + volume.in_step * (kInPlanes * first - (kBackward ? kSpan - 1 : 0));
  }
  // The coordinate of a plane that is read, or a negative number where there is none.
  __device__ __forceinline__ int in(const Volume& volume, int plane) const {
    const int at = first_in + volume.in_step * plane;
    return plane < planes && at < volume.in_size[0] ? at : -1;
  }
};
