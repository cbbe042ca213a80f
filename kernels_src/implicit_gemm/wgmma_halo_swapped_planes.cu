// wgmma_halo_swapped.cu with results channels first.
#define VARIANT_OUTPUT_PLANES
#include "implicit_gemm/wgmma_halo_swapped.cu"
