// Backward weights of float32 as TF32, channels last, as a matrix product on Hopper's tensor cores, float32 sums:
//   dw[k, tap, c] = sum_m x[m at tap, c] * dy[m, k]; m: output pixels, 32 a step.
// Rows are channels, in blocks of 32 of one tap; columns are filters. TF32 products take shared memory with the depth
// side by side alone, but pixels lie outermost in both operands. So x comes to products through registers, and two
// warps turn dy where it lies. Two more warps copy (TMA), x in im2col mode with its padding, into a ring of STAGES;
// CONSUMERS warpgroups multiply, ROWS blocks of 64 rows each, TOGETHER products at once. Blocks are persistent and take
// tiles, or parts of each tile's pixels, which `add_parts` adds in order; or SHARES blocks of a cluster share a part,
// and add what they have in order. POINTWISE: one tap, stride 1 and no padding: x comes as boxes.
// Pixel 8 j + 2 t is term t of product j of a step, the next one term t + 4: so lanes of a fragment meet all banks.
// Design after the public description of Hopper's warp-specialised GEMMs (CUTLASS, sm90).
#include "common/opaque.cuh"
#include "common/split_k.cuh"
#include "implicit_gemm/wgmma_turned.cuh"

// With one product at once, compilers wait for each before the next one's registers are loaded.
constexpr int kTogether = TOGETHER;
static_assert(kTogether == 2 || kTogether == 4, "products along the depth of a step, 8 pixels each");

// Turned columns, as PTX ISA has operands with the depth side by side and 128-byte swizzles: 8 of them, 128 bytes each,
// are a repetition, and the next 8 come 1024 bytes later; the other offset is not used.
constexpr unsigned long long kColumnForm = matrix_descriptor(16, 8 * kSpan, kSpan);

// Registers of a thread at the start, of those that copy and turn, and of those that multiply.
constexpr int kGiven = 65536 / (kThreads * BLOCKS) / 8 * 8, kFew = 64;
constexpr int kMost = (kGiven * (CONSUMERS + 1) - kFew) / CONSUMERS / 8 * 8;
constexpr bool kShares = kGiven < 248;
static_assert(!kShares || (kMost > kGiven && kMost <= 256), "those that multiply get what others leave");

// Turns a block in place, by a warp: from 128 bytes a pixel to 128 bytes a filter, both swizzled; a lane is a filter.
// Reads of a pixel meet all banks once, and so do writes of 16 bytes by 8 lanes. Blocks begin where swizzles do, so
// that these are an exclusive or.
__device__ __forceinline__ void turn(unsigned block) {
  const int lane = threadIdx.x % 32;
  unsigned pixels[kTileK];
#pragma unroll
  for (int m = 0; m < kTileK; m++) pixels[m] = load_shared(((block + 4 * lane) ^ (16 * (m % 8))) + m * kSpan);
  __syncwarp();  // all lanes have read
#pragma unroll
  for (int word = 0; word < kTileK / 4; word++) {
    const int first = word / 2 * 8 + word % 2;
    store_shared((block + lane * kSpan + 16 * (lane % 8)) ^ (16 * word), pixels[first], pixels[first + 2],
                 pixels[first + 4], pixels[first + 6]);
  }
}

__device__ __forceinline__ void turn_all(const Shape& shape, const Ring& ring, int warp) {
  Place at(0);
  for (int number = first_item(); number < shape.items; number = item_after(number)) {
    const Item item = item_at(shape, number);
    for (int step = item.first; step < item.last; step++) {
      mbarrier_wait(ring.y_here + 8 * at.slot, at.parity);
#pragma unroll 1
      for (int block = warp; block < kColumnBlocks; block += kTurners)
        turn(ring.stage(at) + kRowBytes + block * kBlock);
      fence_proxy_async();  // products read what this thread has written, and later copies write there
      __syncwarp();         // all lanes have done so
      if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.turned + 8 * at.slot);
      at.next();
    }
  }
}

// A warp's part of a block of rows: two blocks of 16 products' rows are all of its channels, one is half of them. A
// lane has 2 * ROWS neighbouring channels, in the order of rows g and g + 8 of the first product, then of the second.
struct Lane {
  int block, channel, t;
  unsigned low, high;  // where pixels 2 t and 2 t + 1 of its channels are in a stage

  __device__ __forceinline__ explicit Lane(int consumer) {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    t = threadIdx.x % 4;
    block = ROWS == 2 ? 4 * consumer + warp : 2 * consumer + warp / 2;
    channel = ROWS == 2 ? 4 * g : 16 * (warp % 2) + 2 * g;
    low = block * kBlock + 2 * t * kSpan + 16 * (channel / 4 ^ 2 * t) + 4 * (channel % 4);
    high = (low + kSpan) ^ 16;
  }

  __device__ __forceinline__ void load(unsigned (&a)[ROWS][4], unsigned stage, int k) const {
    unsigned first[2 * ROWS], second[2 * ROWS];
    load_shared(first, stage + low + k * 8 * kSpan);
    load_shared(second, stage + high + k * 8 * kSpan);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int below = 0; below < 2; below++) {
        a[r][below] = first[2 * r + below];
        a[r][2 + below] = second[2 * r + below];
      }
  }
};

// The tile's sums, to the tensor or to this part's place.
__device__ __forceinline__ void write(const Shape& shape, const Item& item, const Lane& lane, float* out,
                                      const float (&sums)[ROWS][kSums]) {
  const Rows rows = rows_at(shape, item, lane.block);
  const int channel = rows.first + lane.channel;
  if (rows.tap >= shape.taps || channel >= shape.channels) return;
  const int first = item.tile_n * TILE_N + 2 * lane.t;
  const int64 pitch = static_cast<int64>(shape.taps) * shape.channels;
  float* to = out + item.split * static_cast<int64>(shape.size) + (item.group * shape.filters + first) * pitch +
              rows.tap * shape.channels + channel;
#pragma unroll
  for (int j = 0; j < TILE_N / 8; j++, to += 8 * pitch) {
    if (first + 8 * j >= shape.filters) break;
#pragma unroll
    for (int next = 0; next < 2; next++) {
      Vector<float, 2 * ROWS> values;
#pragma unroll
      for (int i = 0; i < 2 * ROWS; i++) values.at[i] = sums[i / 2][4 * j + 2 * (i % 2) + next];
      *reinterpret_cast<Vector<float, 2 * ROWS>*>(to + next * pitch) = values;
    }
  }
}

// Likewise to this block's shared memory, where the ring was: channels of a filter side by side.
__device__ __forceinline__ void write_share(unsigned to, int consumer, const Lane& lane,
                                            const float (&sums)[ROWS][kSums]) {
  named_barrier_sync<128 * CONSUMERS>(1);  // all have read the ring
  const unsigned there = to + 4 * (2 * lane.t * kSharePitch + lane.block * kWide + lane.channel);
#pragma unroll
  for (int j = 0; j < TILE_N / 8; j++)
#pragma unroll
    for (int next = 0; next < 2; next++) {
      const unsigned line = there + 4 * (8 * j + next) * kSharePitch;
      if constexpr (ROWS == 2)
        store_shared(line, __float_as_uint(sums[0][4 * j + next]), __float_as_uint(sums[0][4 * j + 2 + next]),
                     __float_as_uint(sums[1][4 * j + next]), __float_as_uint(sums[1][4 * j + 2 + next]));
      else
        store_shared_pair(line, sums[0][4 * j + next], sums[0][4 * j + 2 + next]);
    }
}

// Adds this block's filters of the cluster's shares, in order, and writes them as `write` does.
__device__ __forceinline__ void add_shares(const Shape& shape, unsigned from, float* out) {
  constexpr int kQuads = kTileM / 4, kFilters = TILE_N / SHARES;
  const Item item = item_at(shape, first_item());
  for (int number = threadIdx.x; number < kFilters * kQuads; number += 128 * CONSUMERS) {
    const int column = own_share() * kFilters + number / kQuads, row = number % kQuads * 4;
    const Rows rows = rows_at(shape, item, row / kWide);
    const int channel = rows.first + row % kWide, filter = item.tile_n * TILE_N + column;
    if (rows.tap >= shape.taps || channel >= shape.channels || filter >= shape.filters) continue;
    Vector<float, 4> parts[SHARES];  // all on their way before the first is added
#pragma unroll
    for (int share = 0; share < SHARES; share++)
      parts[share] = load_cluster_floats(map_shared_rank(from + 4 * (column * kSharePitch + row), share));
    Vector<float, 4> total = parts[0];
#pragma unroll
    for (int share = 1; share < SHARES; share++)
#pragma unroll
      for (int i = 0; i < 4; i++) total.at[i] += parts[share].at[i];
    const int64 line = static_cast<int64>(item.group * shape.filters + filter) * shape.taps + rows.tap;
    *reinterpret_cast<Vector<float, 4>*>(out + item.split * static_cast<int64>(shape.size) + line * shape.channels +
                                         channel) = total;
  }
}

// All threads of the cluster come here twice: between, shares are read; afterwards no block reads another's.
__device__ __forceinline__ void meet() {
  cluster_arrive<true>();
  cluster_wait();
}

// What orders memory: this waits for the barriers that copies tell. Turned words are written by threads, who fence them
// before they say so. A stage is empty when the products that read its columns are done: they took all that was loaded
// of its rows, and began after its columns were turned, so that copies overwrite what nobody reads or writes any more.
__device__ __forceinline__ void consume(const Shape& shape, const Ring& ring, float* out, int consumer) {
  const Lane lane(consumer);
  Place at(0);
  for (int number = first_item(); number < shape.items; number = item_after(number)) {
    int steps;
    {
      const Item item = item_at(shape, number);
      steps = item.last - item.first;
    }
    float sums[ROWS][kSums];
    int before = -1;
    for (int step = 0; step < steps; step++) {
      const unsigned stage = ring.stage(at);
      mbarrier_wait(ring.x_here + 8 * at.slot, at.parity);
#pragma unroll
      for (int k = 0; k < kTileK / 8; k += kTogether) {
        unsigned a[kTogether][ROWS][4];
#pragma unroll
        for (int i = 0; i < kTogether; i++) lane.load(a[i], stage, k + i);
        if (k == 0) mbarrier_wait(ring.turned + 8 * at.slot, at.parity);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kTogether; i++)
#pragma unroll
          for (int r = 0; r < ROWS; r++)
            Wgmma<float>::rs(sums[r], a[i][r], descriptor_at(kColumnForm, stage + kRowBytes + (k + i) * 32),
                             step > 0 || k + i > 0);
        wgmma_commit_group();
        wgmma_wait_group<1>();  // those begun before, whose registers are loaded next
        // The step before is done: all its loads have come, or its last products had not begun.
        if (k == 0 && before >= 0) {
          __syncwarp();
          if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.empty + 8 * before);
        }
      }
      before = at.slot;
      at.next();
    }
    wgmma_wait_group<0>();
    __syncwarp();
    if constexpr (SHARES > 1) {  // one item a block, so nobody waits for the last stages
      write_share(ring.stages, consumer, lane, sums);
      break;
    }
    if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.empty + 8 * before);
    write(shape, item_at(shape, opaque(number)), lane, out, sums);  // not kept in registers beside the sums
  }
}

#if SHARES > 1
#define IN_CLUSTERS __cluster_dims__(SHARES, 1, 1)
#else
#define IN_CLUSTERS
#endif

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(kThreads, BLOCKS)
    implicit_gemm_wgmma_turned(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap y, float* out,
                               int filters, int channels, int groups, int taps, int stride_h, int stride_w, int low_h,
                               int low_w, int dilation_h, int dilation_w, int steps, int items, int size, int taps_x,
                               unsigned taps_x_multiplier, int taps_x_shift, int chunks, unsigned chunks_multiplier,
                               int chunks_shift, int height, unsigned height_multiplier, int height_shift, int width,
                               unsigned width_multiplier, int width_shift, int tiles_m, unsigned tiles_m_multiplier,
                               int tiles_m_shift, int tiles_n, unsigned tiles_n_multiplier, int tiles_n_shift,
                               int splits, unsigned splits_multiplier, int splits_shift) {
  const Shape shape{filters,
                    channels,
                    groups,
                    taps,
                    {taps_x, taps_x_multiplier, taps_x_shift},
                    {chunks, chunks_multiplier, chunks_shift},
                    {height, height_multiplier, height_shift},
                    {width, width_multiplier, width_shift},
                    stride_h,
                    stride_w,
                    low_h,
                    low_w,
                    dilation_h,
                    dilation_w,
                    {tiles_m, tiles_m_multiplier, tiles_m_shift},
                    {tiles_n, tiles_n_multiplier, tiles_n_shift},
                    {splits, splits_multiplier, splits_shift},
                    steps,
                    items,
                    size};
  extern __shared__ char shared[];
  __shared__ alignas(8) unsigned long long barriers[4 * STAGES];
  const unsigned first = shared_address(barriers);
  const Ring ring{(shared_address(shared) + 1023) / 1024 * 1024, first, first + 8 * STAGES, first + 16 * STAGES,
                  first + 24 * STAGES};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(ring.x_here + 8 * i, 1);
      mbarrier_init(ring.y_here + 8 * i, 1);
      mbarrier_init(ring.turned + 8 * i, kTurners);
      mbarrier_init(ring.empty + 8 * i, 4 * CONSUMERS);
    }
    fence_mbarrier_init();
  }
  block_sync();  // barriers are ready
  const int role = threadIdx.x / 128;
  if (role < CONSUMERS) {
    if constexpr (kShares) setmaxnreg_inc<kMost>();
    consume(shape, ring, out, role);
    if constexpr (SHARES > 1) {
      meet();
      add_shares(shape, ring.stages, out);
      meet();
    }
  } else {
    if constexpr (kShares) setmaxnreg_dec<kFew>();
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (warp < kTurners)
      turn_all(shape, ring, warp);
    else if (warp == kTurners && lane == 0)
      produce<PixelCopies>(shape, &x, ring, ring.x_here);
    else if (warp == kTurners + 1 && lane == 0)
      produce<FilterCopies>(shape, &y, ring, ring.y_here);
    if constexpr (SHARES > 1) {
      __syncwarp();
      meet();
      meet();
    }
  }
}

// out[i] = sum of partials[split][i] over the splits, by `adders` threads, a power of two: each has neighbouring
// splits.
extern "C" __global__ void __launch_bounds__(256)
    add_parts(const float* partials, float* out, int64 count, int splits, int adders) {
  __shared__ Vector<float, 4> sums[256];
  const int quads = blockDim.x / adders, adder = threadIdx.x / quads;
  const int first = splits * adder / adders, last = splits * (adder + 1) / adders;
  const int64 at = 4 * (static_cast<int64>(blockIdx.x) * quads + threadIdx.x % quads);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  Vector<float, 4> sum = sum_from_first_split<4, 4>(partials, at, count, {first, last, 1}, at < count);
  if (adders > 1) {
    sums[threadIdx.x] = sum;
    __syncthreads();  // all have their sums
    if (adder > 0) return;
    add_lanes(sum, sums, adders, quads);
  }
  if (at < count) *reinterpret_cast<Vector<float, 4>*>(out + at) = sum;
}
