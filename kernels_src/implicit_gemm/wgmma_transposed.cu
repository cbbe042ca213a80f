// Backward weights of float32 as TF32, NHWC, as implicit GEMM on Hopper's tensor cores (wgmma), float32 accumulators:
//   dw[k, tap, c] = sum_m x[m at tap, c] * dy[m, k]; m: output pixels, K, 32 a k-tile.
// M is channels, in blocks of 32 of one tap; N is filters. TF32 wgmma takes operands in shared memory K-major only, but
// pixels lie outermost in both tensors. So x is an operand in registers, and two warps transpose dy where it lies. Two
// producer threads load (TMA, x in im2col mode with its padding) into a pipeline of STAGES; CONSUMERS warpgroups
// multiply ROWS blocks of 64 rows each, K_BATCH instructions along K at once. Persistent blocks take work tiles: tiles,
// or splits of their K, whose partials a second pass adds in order; or the CLUSTER_K blocks of a cluster split K of
// a work tile, and add their partials in order. POINTWISE: one tap, stride 1, no padding: x comes in boxes. Pixel 8 j +
// 2 t is term t of instruction j of a k-tile, the next one term t + 4: lanes of a fragment read every bank once. Design
// after the public description of CUTLASS's GEMMs for sm_90.
#include "common/opaque.cuh"
#include "common/split_k.cuh"
#include "implicit_gemm/wgmma_transposed.cuh"

// wgmma instructions along K that are begun at once: of a single one, compilers wait for each before they load the next
// one's registers.
constexpr int kBatch = K_BATCH;
static_assert(kBatch == 2 || kBatch == 4, "a k-tile of 32 pixels is 4 instructions of 8: K_BATCH is 2 or 4");

// Transposed B, K-major with 128-byte swizzles: 8 rows of 128 bytes repeat. The leading offset is not used.
constexpr unsigned long long kBDescriptor = matrix_descriptor(16, 8 * kSwizzle, kSwizzle);

// Registers of a thread at launch, of those that load and transpose, and of those that multiply.
constexpr int kLaunchRegisters = 65536 / (kThreads * BLOCKS) / 8 * 8, kProducerRegisters = 64;
constexpr int kConsumerRegisters = (kLaunchRegisters * (CONSUMERS + 1) - kProducerRegisters) / CONSUMERS / 8 * 8;
constexpr bool kReallocates = kLaunchRegisters < 248;
static_assert(!kReallocates || (kConsumerRegisters > kLaunchRegisters && kConsumerRegisters <= 256),
              "consumers get the registers that producers give back");

// Transposes a block in place, by a warp: from 128 bytes a pixel to 128 bytes a filter, both swizzled; a lane is a
// filter. Reads of a pixel meet all banks once, and so do writes of 16 bytes by 8 lanes. Blocks begin where swizzles
// repeat, so that these are an exclusive or.
__device__ __forceinline__ void transpose_block(unsigned block) {
  const int lane = threadIdx.x % 32;
  unsigned pixels[kTileK];
#pragma unroll
  for (int m = 0; m < kTileK; m++) pixels[m] = load_shared(((block + 4 * lane) ^ (16 * (m % 8))) + m * kSwizzle);
  __syncwarp();  // all lanes have read
#pragma unroll
  for (int word = 0; word < kTileK / 4; word++) {
    const int first = word / 2 * 8 + word % 2;
    store_shared((block + lane * kSwizzle + 16 * (lane % 8)) ^ (16 * word), pixels[first], pixels[first + 2],
                 pixels[first + 4], pixels[first + 6]);
  }
}

__device__ __forceinline__ void transpose_stages(const Shape& shape, const Pipeline& pipeline, int warp) {
  PipelineState at(0);
  for (int rank = first_work_tile<CLUSTER_K>(); rank < shape.grid.work_tiles; rank = next_work_tile<CLUSTER_K>(rank)) {
    const WorkTile tile = work_tile_at(shape, rank);
    for (int k_tile = tile.first_k_tile; k_tile < tile.end_k_tile; k_tile++) {
      mbarrier_wait(pipeline.y_full + 8 * at.stage, at.parity);
#pragma unroll 1
      for (int block = warp; block < kNBlocks; block += kTransposeWarps)
        transpose_block(pipeline.stage(at) + kABytes + block * kBlockBytes);
      fence_proxy_async();  // wgmma reads what this thread has written, and later TMA loads write there
      __syncwarp();         // all lanes have done so
      if (threadIdx.x % 32 == 0) mbarrier_arrive(pipeline.transposed + 8 * at.stage);
      at.next();
    }
  }
}

// A warp's fragments of A, of a block of 32 channels: two times 16 rows of wgmma are all of the block, one is half of
// it. A lane has 2 * ROWS neighbouring channels, in the order of rows g and g + 8 of the first 64-row block, then of
// the second.
struct Fragments {
  int block, channel, t;
  unsigned low, high;  // where pixels 2 t and 2 t + 1 of its channels are in a stage

  __device__ __forceinline__ explicit Fragments(int consumer) {
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    t = threadIdx.x % 4;
    block = ROWS == 2 ? 4 * consumer + warp : 2 * consumer + warp / 2;
    channel = ROWS == 2 ? 4 * g : 16 * (warp % 2) + 2 * g;
    low = block * kBlockBytes + 2 * t * kSwizzle + 16 * (channel / 4 ^ 2 * t) + 4 * (channel % 4);
    high = (low + kSwizzle) ^ 16;
  }

  __device__ __forceinline__ void load(unsigned (&a)[ROWS][4], unsigned stage, int k) const {
    unsigned first[2 * ROWS], second[2 * ROWS];
    load_shared(first, stage + low + k * 8 * kSwizzle);
    load_shared(second, stage + high + k * 8 * kSwizzle);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int below = 0; below < 2; below++) {
        a[r][below] = first[2 * r + below];
        a[r][2 + below] = second[2 * r + below];
      }
  }
};

// Writes the tile's accumulators to the tensor, or to the split-K partial.
__device__ __forceinline__ void write_tile(const Shape& shape, const WorkTile& tile, const Fragments& lane, float* out,
                                           const float (&acc)[ROWS][kAccumulators]) {
  const MBlock rows = m_block_at(shape, tile, lane.block);
  const int channel = rows.first + lane.channel;
  if (rows.tap >= shape.taps || channel >= shape.channels) return;
  const int first = tile.tile_n * TILE_N + 2 * lane.t;
  const int64 pitch = static_cast<int64>(shape.taps) * shape.channels;
  float* to = out + tile.split * static_cast<int64>(shape.out_size) + (tile.group * shape.filters + first) * pitch +
              rows.tap * shape.channels + channel;
#pragma unroll
  for (int j = 0; j < TILE_N / 8; j++, to += 8 * pitch) {
    if (first + 8 * j >= shape.filters) break;
#pragma unroll
    for (int next = 0; next < 2; next++) {
      Vector<float, 2 * ROWS> values;
#pragma unroll
      for (int i = 0; i < 2 * ROWS; i++) values.at[i] = acc[i / 2][4 * j + 2 * (i % 2) + next];
      *reinterpret_cast<Vector<float, 2 * ROWS>*>(to + next * pitch) = values;
    }
  }
}

// The same to this block's shared memory, where the pipeline was: channels of a filter side by side.
__device__ __forceinline__ void write_cluster_partial(unsigned to, int consumer, const Fragments& lane,
                                                      const float (&acc)[ROWS][kAccumulators]) {
  named_barrier_sync<128 * CONSUMERS>(1);  // all have read the pipeline
  const unsigned there = to + 4 * (2 * lane.t * kPartialPitch + lane.block * kBlock + lane.channel);
#pragma unroll
  for (int j = 0; j < TILE_N / 8; j++)
#pragma unroll
    for (int next = 0; next < 2; next++) {
      const unsigned line = there + 4 * (8 * j + next) * kPartialPitch;
      if constexpr (ROWS == 2)
        store_shared(line, __float_as_uint(acc[0][4 * j + next]), __float_as_uint(acc[0][4 * j + 2 + next]),
                     __float_as_uint(acc[1][4 * j + next]), __float_as_uint(acc[1][4 * j + 2 + next]));
      else
        store_shared_pair(line, acc[0][4 * j + next], acc[0][4 * j + 2 + next]);
    }
}

// Cluster split-K: adds this block's filters of all blocks' partials, in order of ranks, and writes them as
// `write_tile` does.
__device__ __forceinline__ void reduce_cluster_partials(const Shape& shape, unsigned from, float* out) {
  constexpr int kQuads = kTileM / 4, kFilters = TILE_N / CLUSTER_K;
  const WorkTile tile = work_tile_at(shape, first_work_tile<CLUSTER_K>());
  for (int number = threadIdx.x; number < kFilters * kQuads; number += 128 * CONSUMERS) {
    const int column = uniform_cluster_rank() * kFilters + number / kQuads, row = number % kQuads * 4;
    const MBlock rows = m_block_at(shape, tile, row / kBlock);
    const int channel = rows.first + row % kBlock, filter = tile.tile_n * TILE_N + column;
    if (rows.tap >= shape.taps || channel >= shape.channels || filter >= shape.filters) continue;
    Vector<float, 4> partials[CLUSTER_K];  // all on their way before the first is added
#pragma unroll
    for (int rank = 0; rank < CLUSTER_K; rank++)
      partials[rank] = load_cluster_floats(map_shared_rank(from + 4 * (column * kPartialPitch + row), rank));
    Vector<float, 4> total = partials[0];
#pragma unroll
    for (int rank = 1; rank < CLUSTER_K; rank++)
#pragma unroll
      for (int i = 0; i < 4; i++) total.at[i] += partials[rank].at[i];
    const int64 line = static_cast<int64>(tile.group * shape.filters + filter) * shape.taps + rows.tap;
    *reinterpret_cast<Vector<float, 4>*>(out + tile.split * static_cast<int64>(shape.out_size) + line * shape.channels +
                                         channel) = total;
  }
}

// A barrier of all threads of the cluster, twice: partials are read between, and no block reads another's afterwards.
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive<true>();
  cluster_wait();
}

// Memory order: consumers wait for the mbarriers on which TMA loads complete. The transposing warps fence what they
// write (fence.proxy.async) before they arrive. A stage is empty when the wgmma instructions that read its B are done:
// these took all that was loaded of its A, and began after B was transposed, so that TMA overwrites nothing in use.
__device__ __forceinline__ void consume(const Shape& shape, const Pipeline& pipeline, float* out, int consumer) {
  const Fragments lane(consumer);
  PipelineState at(0);
  for (int rank = first_work_tile<CLUSTER_K>(); rank < shape.grid.work_tiles; rank = next_work_tile<CLUSTER_K>(rank)) {
    int k_tiles;
    {
      const WorkTile tile = work_tile_at(shape, rank);
      k_tiles = tile.end_k_tile - tile.first_k_tile;
    }
    float acc[ROWS][kAccumulators];
    int before = -1;
    for (int k_tile = 0; k_tile < k_tiles; k_tile++) {
      const unsigned stage = pipeline.stage(at);
      mbarrier_wait(pipeline.x_full + 8 * at.stage, at.parity);
#pragma unroll
      for (int k = 0; k < kTileK / 8; k += kBatch) {
        unsigned a[kBatch][ROWS][4];
#pragma unroll
        for (int i = 0; i < kBatch; i++) lane.load(a[i], stage, k + i);
        if (k == 0) mbarrier_wait(pipeline.transposed + 8 * at.stage, at.parity);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBatch; i++)
#pragma unroll
          for (int r = 0; r < ROWS; r++)
            Wgmma<float>::rs(acc[r], a[i][r], descriptor_at(kBDescriptor, stage + kABytes + (k + i) * 32),
                             k_tile > 0 || k + i > 0);
        wgmma_commit_group();
        wgmma_wait_group<1>();  // the group before, whose registers are loaded next
        // The k-tile before is done: its last group has read its stage.
        if (k == 0 && before >= 0) {
          __syncwarp();
          if (threadIdx.x % 32 == 0) mbarrier_arrive(pipeline.empty + 8 * before);
        }
      }
      before = at.stage;
      at.next();
    }
    wgmma_wait_group<0>();
    __syncwarp();
    if constexpr (CLUSTER_K > 1) {  // one work tile a block: nobody waits for the last stages
      write_cluster_partial(pipeline.stages, consumer, lane, acc);
      break;
    }
    if (threadIdx.x % 32 == 0) mbarrier_arrive(pipeline.empty + 8 * before);
    write_tile(shape, work_tile_at(shape, opaque(rank)), lane, out,
               acc);  // not kept in registers beside the accumulators
  }
}

#if CLUSTER_K > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER_K, 1, 1)
#else
#define IN_CLUSTERS
#endif

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(kThreads, BLOCKS)
    implicit_gemm_wgmma_transposed(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap y, float* out,
                                   const __grid_constant__ Shape shape) {
  extern __shared__ char shared[];
  __shared__ alignas(8) unsigned long long barriers[4 * STAGES];
  const unsigned first = shared_address(barriers);
  const Pipeline pipeline{(shared_address(shared) + 1023) / 1024 * 1024, first, first + 8 * STAGES, first + 16 * STAGES,
                          first + 24 * STAGES};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(pipeline.x_full + 8 * i, 1);
      mbarrier_init(pipeline.y_full + 8 * i, 1);
      mbarrier_init(pipeline.transposed + 8 * i, kTransposeWarps);
      mbarrier_init(pipeline.empty + 8 * i, 4 * CONSUMERS);
    }
    fence_mbarrier_init();
  }
  block_sync();  // mbarriers are initialised
  const int role = threadIdx.x / 128;
  if (role < CONSUMERS) {
    if constexpr (kReallocates) setmaxnreg_inc<kConsumerRegisters>();
    consume(shape, pipeline, out, role);
    if constexpr (CLUSTER_K > 1) {
      cluster_sync();
      reduce_cluster_partials(shape, pipeline.stages, out);
      cluster_sync();
    }
  } else {
    if constexpr (kReallocates) setmaxnreg_dec<kProducerRegisters>();
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (warp < kTransposeWarps)
      transpose_stages(shape, pipeline, warp);
    else if (warp == kTransposeWarps && lane == 0)
      produce<PixelLoads>(shape, &x, pipeline, pipeline.x_full);
    else if (warp == kTransposeWarps + 1 && lane == 0)
      produce<FilterLoads>(shape, &y, pipeline, pipeline.y_full);
    if constexpr (CLUSTER_K > 1) {
      __syncwarp();
      cluster_sync();
      cluster_sync();
    }
  }
}

constexpr int kReductionThreads = 256;

extern "C" __global__ void __launch_bounds__(kReductionThreads)
    implicit_gemm_wgmma_transposed_finish(const float* partials, float* out, int size, int splits, int lanes) {
  reduce_split_k<kReductionThreads, 4>(partials, out, size, splits, lanes);
}
