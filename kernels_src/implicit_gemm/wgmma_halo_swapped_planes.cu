// wgmma_halo_swapped.cu with results channels first.
#define VARIANT_NCHW_OUTPUT
#include "implicit_gemm/wgmma_halo_swapped.cu"
