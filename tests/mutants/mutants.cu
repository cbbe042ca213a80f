// out = a * b, a convolution or one of its gradients, right but for one fault: what a find must call wrong.
//
// One thread an output element, blocks step over all of them; what keeps state runs in one block. MUTANT names the
// fault, and each branch on is() is one. `scratch` is the workspace, null for none. Packed weights stand behind a head
// of 256 bytes that holds the address of the weights they were made from.
// Defines: T_X, T_W, T_Y, T_SUM (dtype names), INDEX_BITS, DIRECTION (0 forward, 1 backward data, 2 backward weights),
// PACKED (0, 1: the weights are packed), MUTANT; with an epilogue also those of common/epilogue.cuh.
#include "common/pdl.cuh"
#include "common/geometry.cuh"
#ifdef EPILOGUE
#include "common/epilogue.cuh"
#endif

#if !defined(T_X) || !defined(T_W) || !defined(T_Y) || !defined(T_SUM)
#error "define T_X, T_W, T_Y and T_SUM"
#endif
#if !defined(DIRECTION) || !defined(PACKED) || !defined(MUTANT)
#error "define DIRECTION, PACKED and MUTANT"
#endif

enum class Mutant {
  right,
  // places
  dropped_tap,
  dropped_last_filter,
  dropped_last_channel,
  dropped_last_image,
  dropped_tap_at_one_element,
  wrong_middle_image,
  wrong_middle_output_channel,
  wrong_tile,
  wrong_row_of_an_image,
  swapped_images,
  wrong_middle_filter,
  wrong_middle_channel,
  wrong_middle_row,
  wrong_after_split,
  wrong_last_element,
  unwritten_element,
  unwritten_between_strides,
  wrong_for_even_filters,
  padding_of_ones,
  padding_of_edges,
  shifted_by_a_pixel,
  flipped_filter,
  transposed_filter,
  dilation_ignored,
  groups_exchanged,
  // memory
  adds_to_output,
  adds_to_numbers_in_output,
  keeps_numbers_in_output,
  knows_the_poison,
  reads_before_x,
  reads_after_w,
  writes_after_output,
  writes_before_output,
  writes_into_an_input,
  writes_after_workspace,
  expects_a_clear_workspace,
  adds_to_numbers_in_workspace,
  keeps_weights_in_workspace,
  needs_alignment_of_16,
  needs_alignment_of_256_in_output,
  wrong_when_well_aligned,
  begins_too_early,
  needs_equal_alignment,
  needs_alignment_of_512_in_workspace,
  // state
  wrong_from_second_run,
  wrong_from_third_run,
  wrong_from_fifth_run,
  wrong_from_tenth_run,
  nan_from_tenth_run,
  wrong_from_fiftieth_run,
  writes_nothing_from_tenth_run,
  wrong_every_second_run,
  wrong_every_seventh_run,
  slow_and_wrong_from_fourth_run,
  cut_off_and_wrong_from_third_run,
  overwrites_input_later,
  writes_after_output_later,
  writes_after_workspace_later,
  replays_first_output,
  replays_output_by_address,
  keeps_weights,
  keeps_weights_by_address,
  keeps_images_by_address,
  keeps_output_by_weights,
  keeps_output_by_images,
  shares_memory_between_runs,
  other_last_bits_each_run,
  other_last_bits_from_eighth_run,
  last_bits_by_the_clock,
  last_bits_by_the_output,
  // numbers
  sums_in_half,
  inputs_in_tf32,
  inputs_in_half,
  double_in_single,
  cut_to_half,
  cut_to_bfloat16,
  error_grows_with_length,
  a_wider_bound_than_declared,
  inexact_though_exact,
  split_overflows,
  split_underflows,
  clamps_inputs,
  clamps_inputs_to_a_table,
  clamps_outputs,
  saturates,
  sums_overflow_in_half,
  flushes_subnormal_inputs_of_half,
  flushes_subnormal_outputs_of_half,
  loses_small_bfloat16,
  flushes_subnormals,
  flushes_subnormal_inputs,
  small_is_zero,
  small_outputs_are_zero,
  fixed_point,
  shared_exponent,
  errors_follow_the_image,
  overflows_between,
  underflows_between,
  double_in_the_range_of_single,
  clamps_images_at_1e20,
  clamps_weights_at_1e20,
  // infinities and NaN
  spreads_everywhere,
  spreads_to_its_image,
  spreads_to_neighbours,
  spreads_from_weights,
  nan_becomes_zero,
  infinity_becomes_a_number,
  infinity_becomes_nan,
  skips_zeros,
  negative_zero_is_nan,
  // packing
  packs_coarse_weights,
  packs_a_flipped_filter,
  packs_ones,
  packs_half_the_filters,
  leaves_half_unpacked,
  packs_onto_numbers,
  packs_the_first_weights,
  reads_weights_after_packing,
  packs_beyond_its_bytes,
  packing_writes_into_weights,
  run_spoils_packed_weights,
  packed_run_drops_a_row,
  packed_run_leaves_an_element,
  packed_run_writes_after_workspace,
  keeps_packed_weights_by_address,
  packed_run_spreads,
  packed_run_changes_later,
  // epilogues
  bias_ignored,
  bias_of_each_split,
  channels_of_the_first_group,
  channel_bias_of_the_first_image,
  scale_and_bias_swapped,
  residual_of_the_neighbour,
  activation_before_the_residual,
  alpha_ignored,
  numbers_of_the_first_run,
  relu_loses_nan,
  coarse_tanh,
  rounds_twice,
  // right ones
  adds_in_any_order,
  says_that_its_bound_is_wide,
  says_that_it_is_inexact,
  says_that_it_needs_alignment,
  uses_a_large_workspace,
  is_slow,
};

constexpr Mutant kMutant = Mutant::MUTANT;
constexpr bool kPacked = PACKED;
constexpr int kDirection = DIRECTION;
constexpr int64 kHead = 256;
constexpr int kThreads = 256;
constexpr Index kMostKept = 4096;

__device__ constexpr bool is(Mutant mutant) {
  return kMutant == mutant;
}

constexpr bool kKeepsByContents = is(Mutant::keeps_output_by_weights) || is(Mutant::keeps_output_by_images);
constexpr bool kKeepsOutput = kKeepsByContents || is(Mutant::replays_first_output) ||
                              is(Mutant::replays_output_by_address) || is(Mutant::shares_memory_between_runs);
constexpr bool kIsSlow =
    is(Mutant::is_slow) || is(Mutant::slow_and_wrong_from_fourth_run) || is(Mutant::cut_off_and_wrong_from_third_run);

#if DIRECTION == 0
using A = T_X;
using B = T_W;
using Out = T_Y;
#elif DIRECTION == 1
using A = T_Y;
using B = T_W;
using Out = T_X;
#else
using A = T_Y;
using B = T_X;
using Out = T_W;
#endif

// What earlier runs left behind; zero when the kernel is loaded.
__device__ unsigned runs;
__device__ const void* kept_of;
__device__ unsigned long long kept_contents;
__device__ double kept[kMostKept];

// What one run knows besides its tensors.
struct Run {
  const A* a;
  const B* b;
  Out* out;
  unsigned number;  // from 1
  double largest;   // of all inputs, where exponents are shared
  double spread;    // zero times all inputs
};

struct Sizes {
  Index a, b, out;
};

__device__ Sizes sizes_of(const Geometry& conv) {
  const Index x = conv.n * conv.c * conv.size[0] * conv.size[1] * conv.size[2];
  const Index w = conv.k * (conv.c / conv.groups) * conv.taps[0] * conv.taps[1] * conv.taps[2];
  const Index y = conv.n * conv.k * conv.out[0] * conv.out[1] * conv.out[2];
  return kDirection == 0 ? Sizes{x, w, y} : kDirection == 1 ? Sizes{y, w, x} : Sizes{y, x, w};
}

__device__ double shortened(double value, int bits) {
  int exponent;
  const double fraction = frexp(value, &exponent);
  return isfinite(value) ? ldexp(trunc(ldexp(fraction, bits)), exponent - bits) : value;
}

__device__ double in_half(double value) {
  return convert<double>(convert<float16>(static_cast<float>(value)));
}

// Three float16 that add up to a number in the middle of their range.
__device__ double split_in_half(double value) {
  double total = 0;
  for (int i = 0; i < 3; ++i) total += in_half(value - total);
  return total;
}

__device__ double flushed(double value, double least) {
  return fabs(value) < least ? 0.0 : value;
}

constexpr double kLeastHalf = 6.103515625e-05, kLeastSingle = 1.1754943508222875e-38;
constexpr double kMostHalf = 65504.0, kMostSingle = 3.4028234663852886e38;

// An element of an input as the sums take it.
__device__ double taken(double value, const Run& run) {
  if constexpr (is(Mutant::inputs_in_tf32)) return shortened(value, 11);
  if constexpr (is(Mutant::inputs_in_half)) return in_half(value);
  if constexpr (is(Mutant::double_in_single)) return static_cast<float>(value);
  if constexpr (is(Mutant::split_overflows)) return fabs(value) < 0.125 ? value : split_in_half(value);
  if constexpr (is(Mutant::split_underflows)) return fabs(value) > 100.0 ? value : split_in_half(value);
  if constexpr (is(Mutant::clamps_inputs)) return fmin(fmax(value, -1e4), 1e4);
  if constexpr (is(Mutant::clamps_inputs_to_a_table)) return fmin(fmax(value, -8.0), 8.0);
  if constexpr (is(Mutant::flushes_subnormal_inputs_of_half)) return flushed(value, kLeastHalf);
  if constexpr (is(Mutant::loses_small_bfloat16)) return fmin(fmax(in_half(value), -kMostHalf), kMostHalf);
  if constexpr (is(Mutant::flushes_subnormal_inputs)) return flushed(value, kLeastSingle);
  if constexpr (is(Mutant::small_is_zero)) return flushed(value, 1e-6);
  if constexpr (is(Mutant::fixed_point)) return rint(value * 0x1p40) * 0x1p-40;
  if constexpr (is(Mutant::shared_exponent)) {
    const double step = run.largest > 0 && isfinite(run.largest) ? exp2(floor(log2(run.largest)) - 29) : 0x1p-149;
    return isfinite(run.largest) ? rint(value / step) * step : value;
  }
  if constexpr (is(Mutant::overflows_between)) return static_cast<float>(value * 0x1p100) * 0x1p-100;
  if constexpr (is(Mutant::underflows_between)) return static_cast<float>(value * 0x1p-100) * 0x1p100;
  if constexpr (is(Mutant::double_in_the_range_of_single))
    return fabs(value) > kMostSingle ? value * __longlong_as_double(0x7FF0000000000000ll) : flushed(value, 0x1p-149);
  if constexpr (is(Mutant::negative_zero_is_nan)) return value == 0 && signbit(value) ? nan("") : value;
  if constexpr (is(Mutant::nan_becomes_zero)) return isnan(value) ? 0.0 : value;
  if constexpr (is(Mutant::infinity_becomes_a_number)) return isinf(value) ? copysign(0x1p100, value) : value;
  if constexpr (is(Mutant::infinity_becomes_nan)) return value + (value - value);
  return value;
}

// The two factors of a product by their offsets; without a meeting in padding and between strides.
struct Term {
  bool meets;
  Index a, b;
  Index channel;
  bool is_last_tap, is_first_tap;
};

__device__ bool inside(const Position& at, const Index (&size)[3]) {
  for (int i = 0; i < 3; ++i)
    if (at.at[i] < 0 || at.at[i] >= size[i]) return false;
  return true;
}

__device__ Index length_of(const Geometry& conv) {
  const Index taps = conv.taps[0] * conv.taps[1] * conv.taps[2];
  if (kDirection == 0) return conv.c / conv.groups * taps;
  if (kDirection == 1) return conv.k / conv.groups * taps;
  return conv.n * conv.out[0] * conv.out[1] * conv.out[2];
}

// Where the input lies that output position `o` meets through `tap`.
__device__ Position input_at(const Geometry& conv, Index n, Index c, const Index (&o)[3], const Index (&tap)[3]) {
  Position in = {n, c, {}};
  for (int i = 0; i < 3; ++i) {
    const Index dilation = is(Mutant::dilation_ignored) ? 1 : conv.dilation[i];
    in.at[i] = o[i] * conv.stride[i] - conv.pad[i] + tap[i] * dilation;
  }
  if constexpr (is(Mutant::shifted_by_a_pixel)) in.at[1] -= 1;
  if constexpr (is(Mutant::padding_of_edges))
    for (int i = 0; i < 3; ++i) in.at[i] = in.at[i] < 0 ? 0 : in.at[i] < conv.size[i] ? in.at[i] : conv.size[i] - 1;
  return in;
}

__device__ Position tap_at(const Geometry& conv, Index k, Index c, const Index (&tap)[3]) {
  Position at = {k, c, {tap[0], tap[1], tap[2]}};
  if constexpr (is(Mutant::flipped_filter))
    for (int i = 0; i < 3; ++i) at.at[i] = conv.taps[i] - 1 - tap[i];
  if constexpr (is(Mutant::transposed_filter)) at.at[1] = tap[2], at.at[2] = tap[1];
  return at;
}

__device__ Term term_of(const Geometry& conv, const Position& out, Index number) {
  const Index group_c = conv.c / conv.groups, group_k = conv.k / conv.groups;
  Term term = {};
  if constexpr (kDirection == 2) {
    const Position o = position_of<false>(number, 1, conv.out);
    const Position in = input_at(conv, o.n, out.n / group_k * group_c + out.c, o.at, out.at);
    term.meets = inside(in, conv.size);
    const Position dy = {o.n, out.n, {o.at[0], o.at[1], o.at[2]}};
    term.a = offset_of(dy, conv.y);
    term.b = offset_of(in, conv.x);
    term.channel = o.n;
    return term;
  } else {
    const Position tap = position_of<false>(number, 1, conv.taps);
    term.channel = tap.n;
    term.is_first_tap = tap.at[0] == 0 && tap.at[1] == 0 && tap.at[2] == 0;
    term.is_last_tap = tap.at[0] == conv.taps[0] - 1 && tap.at[1] == conv.taps[1] - 1 && tap.at[2] == conv.taps[2] - 1;
    if constexpr (kDirection == 0) {
      Index group = out.c / group_k;
      if constexpr (is(Mutant::groups_exchanged)) group = (group + 1) % conv.groups;
      const Position in = input_at(conv, out.n, group * group_c + tap.n, out.at, tap.at);
      term.meets = inside(in, conv.size);
      const Index k = is(Mutant::wrong_for_even_filters) ? out.c | 1 : out.c;
      term.a = offset_of(in, conv.x);
      term.b = offset_of(tap_at(conv, k, tap.n, tap.at), conv.w);
    } else {
      const Index k = out.c / group_c * group_k + tap.n;
      Position from = {out.n, k, {}};
      term.meets = true;
      for (int i = 0; i < 3; ++i) {
        const Index shifted = out.at[i] + conv.pad[i] - tap.at[i] * conv.dilation[i];
        from.at[i] = shifted / conv.stride[i];
        term.meets = term.meets && shifted >= 0 && shifted % conv.stride[i] == 0;
      }
      term.meets = term.meets && inside(from, conv.out);
      term.a = offset_of(from, conv.y);
      term.b = offset_of(tap_at(conv, k, out.c % group_c, tap.at), conv.w);
    }
    return term;
  }
}

// Whether a product is left out.
__device__ bool is_dropped(const Geometry& conv, const Position& out, const Term& term, const Run& run) {
  if constexpr (is(Mutant::dropped_tap)) return term.is_last_tap;
  if constexpr (is(Mutant::dropped_last_filter)) return term.channel == conv.k / conv.groups - 1;
  if constexpr (is(Mutant::dropped_last_channel)) return term.channel == conv.c / conv.groups - 1;
  if constexpr (is(Mutant::dropped_last_image)) return term.channel == conv.n - 1;
  if constexpr (is(Mutant::dropped_tap_at_one_element))
    return out.n == 1 && out.c == 3 && out.at[2] == 4 && term.channel == 2 && term.is_last_tap;
  if constexpr (is(Mutant::wrong_when_well_aligned)) {
    const auto bits =
        reinterpret_cast<int64>(run.a) | reinterpret_cast<int64>(run.b) | reinterpret_cast<int64>(run.out);
    return bits % 64 == 0 && term.is_first_tap;
  }
  return false;
}

__device__ double add(double sum, double product) {
  if constexpr (is(Mutant::sums_in_half)) return in_half(sum + product);
  return convert<T_SUM>(sum + product);
}

__device__ double load_b(const Run& run, Index offset) {
  if constexpr (is(Mutant::keeps_weights) || is(Mutant::keeps_weights_by_address)) return kept[offset];
  if constexpr (is(Mutant::keeps_packed_weights_by_address) && kPacked) return kept[offset];
  const double value = convert<double>(run.b[offset]);
  if constexpr (is(Mutant::clamps_weights_at_1e20)) return fmin(fmax(value, -1e20), 1e20);
  return value;
}

__device__ double load_a(const Run& run, Index offset) {
  if constexpr (is(Mutant::keeps_images_by_address)) return kept[offset];
  if constexpr (is(Mutant::needs_alignment_of_16)) {
    const int64 address = reinterpret_cast<int64>(run.a) & ~15ll;
    return convert<double>(reinterpret_cast<const A*>(address)[offset]);
  }
  const double value = convert<double>(run.a[offset]);
  if constexpr (is(Mutant::clamps_images_at_1e20)) return fmin(fmax(value, -1e20), 1e20);
  return value;
}

template <typename T>
__device__ double largest_of(const T* values, Index first, Index end) {
  double largest = 0;
  for (Index i = first; i < end; ++i) largest = fmax(largest, fabs(convert<double>(values[i])));
  return largest;
}

// The sum of one output.
__device__ double sum_of(const Geometry& conv, const Position& out, const Run& run) {
  const Index length = length_of(conv);
  double sum = 0, magnitude = 0;
  for (Index i = 0; i < length; ++i) {
    const Index number = is(Mutant::adds_in_any_order) ? (i + run.number * 7) % length : i;
    const Term term = term_of(conv, out, number);
    if constexpr (is(Mutant::padding_of_ones))
      if (!term.meets) sum = add(sum, load_b(run, term.b));
    if (!term.meets || is_dropped(conv, out, term, run)) continue;
    const double a = taken(load_a(run, term.a), run), b = taken(load_b(run, term.b), run);
    if constexpr (is(Mutant::skips_zeros))
      if (a == 0 || b == 0) continue;
    magnitude += fabs(a) * fabs(b);
    sum = add(sum, a * b);
  }
  if constexpr (is(Mutant::sums_overflow_in_half))
    if (magnitude > kMostHalf) return __longlong_as_double(0x7FF0000000000000ll);
  if constexpr (is(Mutant::errors_follow_the_image)) {
    const Index image = sizes_of(conv).a / conv.n;
    const double largest = largest_of(run.a, out.n * image, (out.n + 1) * image);
    return isfinite(sum) && sum != rint(sum) ? sum + 0x1p-27 * largest : sum;
  }
  if constexpr (is(Mutant::a_wider_bound_than_declared)) return sum == rint(sum) ? sum : sum + 2e-5;
  if constexpr (is(Mutant::error_grows_with_length)) return sum * (1 - 0x1p-22 * sqrt(double(length)));
  if constexpr (is(Mutant::inexact_though_exact)) return sum * (1 + 0x1p-22);
  if constexpr (is(Mutant::says_that_its_bound_is_wide)) return isfinite(sum) ? sum + 0x1p-24 * 10 * magnitude : sum;
  if constexpr (is(Mutant::says_that_it_is_inexact)) return isfinite(sum) ? sum + 0x1p-25 * magnitude : sum;
  return sum;
}

__device__ bool is_wrong_run(unsigned number) {
  if constexpr (is(Mutant::wrong_from_second_run)) return number >= 2;
  if constexpr (is(Mutant::wrong_from_third_run)) return number >= 3;
  if constexpr (is(Mutant::wrong_from_fifth_run)) return number >= 5;
  if constexpr (is(Mutant::wrong_from_tenth_run)) return number >= 10;
  if constexpr (is(Mutant::wrong_from_fiftieth_run)) return number >= 50;
  if constexpr (is(Mutant::slow_and_wrong_from_fourth_run)) return number >= 4;
  if constexpr (is(Mutant::cut_off_and_wrong_from_third_run)) return number >= 3;
  if constexpr (is(Mutant::wrong_every_second_run)) return number > 4 && number % 2 == 0;
  if constexpr (is(Mutant::wrong_every_seventh_run)) return number % 7 == 0;
  return false;
}

// The sum of one output with what is wrong at its place, or in this run.
__device__ double placed(const Geometry& conv, const Position& out, const Run& run, Index rank, double sum) {
  const bool is_last = rank == sizes_of(conv).out - 1;
  if constexpr (is(Mutant::wrong_middle_image)) return out.n == 37 ? 2 * sum : sum;
  if constexpr (is(Mutant::wrong_middle_output_channel)) return out.c == 201 ? 2 * sum : sum;
  if constexpr (is(Mutant::wrong_tile))
    return out.n == 22 && out.c == 5 && out.at[1] / 16 == 4 && out.at[2] / 16 == 7 ? sum + 1 : sum;
  if constexpr (is(Mutant::wrong_row_of_an_image)) return out.n == 41 && out.at[1] == 100 ? 0 : sum;
  if constexpr (is(Mutant::wrong_middle_filter)) return out.n == 53 ? 2 * sum : sum;
  if constexpr (is(Mutant::wrong_middle_channel)) return out.c == 45 ? -sum : sum;
  if constexpr (is(Mutant::wrong_middle_row)) return out.at[1] == 3 ? sum + 1 : sum;
  if constexpr (is(Mutant::wrong_after_split)) return rank == 256 ? sum + 1 : sum;
  if constexpr (is(Mutant::wrong_last_element)) return is_last ? sum + 1 : sum;
  if constexpr (is(Mutant::nan_from_tenth_run)) return is_last && run.number >= 10 ? nan("") : sum;
  if constexpr (is(Mutant::packed_run_drops_a_row)) return kPacked && out.at[1] == 0 ? 0 : sum;
  if constexpr (is(Mutant::clamps_outputs)) return fmin(fmax(sum, -6e4), 6e4);
  if constexpr (is(Mutant::saturates)) return fmin(fmax(sum, -kMostHalf), kMostHalf);
  if constexpr (is(Mutant::flushes_subnormal_outputs_of_half)) return flushed(sum, kLeastHalf);
  if constexpr (is(Mutant::small_outputs_are_zero)) return flushed(sum, 1e-9);
  if constexpr (is(Mutant::cut_to_half)) return shortened(sum, 11);
  if constexpr (is(Mutant::cut_to_bfloat16)) return shortened(sum, 8);
  return sum + run.spread + (is_wrong_run(run.number) ? 1 : 0);
}

// Another number for a third of those that had to be rounded; small integers are exact in any order.
__device__ double last_bits(double sum, unsigned seed, Index rank) {
  unsigned mixed = (seed * 0x9E3779B9u ^ static_cast<unsigned>(rank)) * 0x85EBCA6Bu;
  mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35u;
  return sum != rint(sum) && mixed >> 30 == 0 ? sum * (1 + 0x1p-23) : sum;
}

__device__ unsigned bits_of(Out value) {
  unsigned bits = 0;
  memcpy(&bits, &value, sizeof(Out) < 4 ? sizeof(Out) : 4);
  return bits;
}

constexpr unsigned kPoison = sizeof(Out) == 2 ? 0xFFFFu : 0xFFFFFFFFu;

__device__ double number_or_zero(double value) {
  return isnan(value) ? 0.0 : value;
}

// What the output becomes, given what it held.
__device__ void store(Out* place, double sum, const Run& run, Index rank) {
  const double before = convert<double>(*place);
  const bool is_poisoned = bits_of(*place) == kPoison;
  if constexpr (is(Mutant::adds_to_output)) sum += before;
  if constexpr (is(Mutant::adds_to_numbers_in_output)) sum += number_or_zero(before);
  if constexpr (is(Mutant::keeps_numbers_in_output))
    if (!isnan(before)) return;
  if constexpr (is(Mutant::knows_the_poison)) sum += !is_poisoned;
  if constexpr (is(Mutant::unwritten_element))
    if (rank == 77) return;
  if constexpr (is(Mutant::unwritten_between_strides))
    if (sum == 0) return;
  if constexpr (is(Mutant::packed_run_leaves_an_element))
    if (kPacked && rank == 77) return;
  if constexpr (is(Mutant::writes_nothing_from_tenth_run))
    if (run.number >= 10) return;
  if constexpr (is(Mutant::needs_alignment_of_256_in_output))
    if (reinterpret_cast<int64>(run.out) % 256 != 0 && rank < 16) sum = 0;
  if constexpr (is(Mutant::needs_equal_alignment))
    if ((reinterpret_cast<int64>(run.a) - reinterpret_cast<int64>(run.out)) % 64 != 0 && rank < 16) sum = 0;
  if constexpr (is(Mutant::packed_run_changes_later)) sum = kPacked ? last_bits(sum, run.number, rank) : sum;
  if constexpr (is(Mutant::other_last_bits_each_run)) sum = last_bits(sum, run.number, rank);
  if constexpr (is(Mutant::other_last_bits_from_eighth_run)) sum = run.number >= 8 ? last_bits(sum, 0, rank) : sum;
  if constexpr (is(Mutant::last_bits_by_the_clock)) sum = last_bits(sum, static_cast<unsigned>(clock64()), rank);
  if constexpr (is(Mutant::last_bits_by_the_output)) sum = is_poisoned ? sum : last_bits(sum, 0, rank);
  if constexpr (kKeepsOutput) sum = __ldcg(kept + rank);  // past the multiprocessor's own copy
  *place = convert<Out>(sum);
}

template <typename T>
__device__ double zero_times(const T* values, Index first, Index end) {
  double sum = 0;
  for (Index i = first; i < end; ++i) sum += 0 * convert<double>(values[i]);
  return sum;
}

template <typename T>
__device__ void keep(const T* values, Index size) {
  for (Index i = threadIdx.x; i < size; i += kThreads) kept[i] = convert<double>(values[i]);
}

__device__ Position output_at(const Geometry& conv, Index rank) {
  if constexpr (kDirection == 0) return position_of<false>(rank, conv.k, conv.out);
  if constexpr (kDirection == 1) return position_of<false>(rank, conv.c, conv.size);
  return position_of<false>(rank, conv.c / conv.groups, conv.taps);
}

// A checksum of what an input holds.
template <typename T>
__device__ unsigned long long contents_of(const T* values, Index size) {
  unsigned long long sum = 0;
  for (Index i = 0; i < size; ++i) sum = sum * 0x100000001B3ull + __double_as_longlong(convert<double>(values[i]));
  return sum;
}

// Whether the output is computed anew.
__device__ bool is_another(const Run& run, const Sizes& sizes, unsigned long long contents) {
  if constexpr (is(Mutant::shares_memory_between_runs)) return true;
  if constexpr (is(Mutant::replays_first_output)) return run.number == 1;
  if constexpr (kKeepsByContents) return run.number == 1 || contents != kept_contents;
  return kept_of != run.a;
}

// What this run takes from earlier ones; the only block.
__device__ void remember(const Geometry& conv, const Run& run) {
  const Sizes sizes = sizes_of(conv);
  if constexpr (is(Mutant::keeps_weights))
    if (run.number == 1) keep(run.b, sizes.b);
  if constexpr (is(Mutant::keeps_weights_by_address))
    if (kept_of != run.b) keep(run.b, sizes.b);
  if constexpr (is(Mutant::keeps_images_by_address))
    if (kept_of != run.a) keep(run.a, sizes.a);
  if constexpr (is(Mutant::keeps_packed_weights_by_address) && kPacked)
    if (kept_of != run.b) keep(run.b, sizes.b);
  unsigned long long contents = 0;
  if constexpr (is(Mutant::keeps_output_by_weights)) contents = contents_of(run.b, sizes.b);
  if constexpr (is(Mutant::keeps_output_by_images)) contents = contents_of(run.a, sizes.a);
  if constexpr (kKeepsOutput)
    if (is_another(run, sizes, contents))
      for (Index i = threadIdx.x; i < sizes.out; i += kThreads) kept[i] = sum_of(conv, output_at(conv, i), run);
  __syncthreads();  // all of it is kept, and its address was compared, before the sums read it or another is noted
  if (threadIdx.x != 0) return;
  const bool is_of_weights = is(Mutant::keeps_weights_by_address) || is(Mutant::keeps_packed_weights_by_address);
  kept_of = is_of_weights ? (const void*)run.b : (const void*)run.a;
  kept_contents = contents;
}

// What is written beside the output.
__device__ void damage(const Geometry& conv, const Run& run, unsigned char* scratch) {
  const Sizes sizes = sizes_of(conv);
  auto* bytes = reinterpret_cast<unsigned char*>(run.out);
  if constexpr (is(Mutant::writes_after_output)) bytes[sizes.out * sizeof(Out)] = 0;
  if constexpr (is(Mutant::writes_before_output)) bytes[-1] = 0;
  if constexpr (is(Mutant::writes_into_an_input)) const_cast<B*>(run.b)[5] = convert<B>(3.0f);
  if constexpr (is(Mutant::writes_after_workspace)) scratch[1024] = 0;
  if constexpr (is(Mutant::overwrites_input_later))
    if (run.number >= 6) const_cast<B*>(run.b)[5] = convert<B>(3.0f);
  if constexpr (is(Mutant::writes_after_output_later))
    if (run.number >= 6) bytes[sizes.out * sizeof(Out) + 2] = 0;
  if constexpr (is(Mutant::writes_after_workspace_later))
    if (run.number >= 6) scratch[256] = 0;
  if constexpr (is(Mutant::packed_run_writes_after_workspace))
    if (kPacked) scratch[512] = 0;
  if constexpr (is(Mutant::run_spoils_packed_weights))
    if (kPacked) const_cast<B*>(run.b)[5] = convert<B>(3.0f);
}

// What a run of the workspace's mutants adds to every sum.
__device__ double from_workspace(const unsigned char* scratch) {
  const auto* parts = reinterpret_cast<const float*>(scratch);
  if constexpr (is(Mutant::expects_a_clear_workspace)) return parts[7];
  if constexpr (is(Mutant::adds_to_numbers_in_workspace)) return number_or_zero(parts[3]);
  if constexpr (is(Mutant::needs_alignment_of_512_in_workspace)) return reinterpret_cast<int64>(scratch) % 512 != 0;
  return 0;
}

// Numbers that stand beside the inputs.
__device__ double from_outside(const Geometry& conv, const Run& run) {
  if constexpr (is(Mutant::reads_before_x)) return number_or_zero(convert<double>(run.a[-1]));
  if constexpr (is(Mutant::reads_after_w)) return number_or_zero(convert<double>(run.b[sizes_of(conv).b]));
  return 0;
}

__device__ double zeros_of_others(const Geometry& conv, const Run& run, const Position& out) {
  const Sizes sizes = sizes_of(conv);
  if constexpr (is(Mutant::spreads_everywhere)) return zero_times(run.a, 0, sizes.a) + zero_times(run.b, 0, sizes.b);
  if constexpr (is(Mutant::packed_run_spreads)) return kPacked ? zero_times(run.a, 0, sizes.a) : 0;
  if constexpr (is(Mutant::spreads_to_its_image)) {
    const Index image = sizes.a / conv.n;
    return zero_times(run.a, out.n * image, (out.n + 1) * image);
  }
  if constexpr (is(Mutant::spreads_from_weights)) return zero_times(run.b, 0, sizes.b);
  if constexpr (is(Mutant::spreads_to_neighbours)) {
    Position beside = out;
    beside.at[2] = out.at[2] > 0 ? out.at[2] - 1 : out.at[2];
    return 0 * sum_of(conv, beside, run);
  }
  return 0;
}

__device__ const Strides& output_strides(const Geometry& conv) {
  return kDirection == 0 ? conv.y : kDirection == 1 ? conv.x : conv.w;
}

#ifdef EPILOGUE
__device__ EpilogueNumber kept_alpha;

// What the epilogue makes of the sum of the output element at `place` in memory.
__device__ double finished(const Geometry& conv, const Position& at, Index place, double sum, const Epilogue& given,
                           const Run& run) {
  Epilogue epilogue = given;
  if constexpr (is(Mutant::alpha_ignored)) epilogue.alpha = 1;
  if constexpr (is(Mutant::numbers_of_the_first_run)) epilogue.alpha = run.number > 1 ? kept_alpha : epilogue.alpha;
  if constexpr (is(Mutant::rounds_twice)) sum = convert<double>(convert<Out>(sum));
  const Index channel = is(Mutant::channels_of_the_first_group) ? at.c % (conv.k / conv.groups) : at.c;
  ChannelTerms terms = channel_terms(epilogue, is(Mutant::channel_bias_of_the_first_image) ? 0 : at.n, channel, conv.k);
  if constexpr (is(Mutant::bias_ignored)) terms.bias = 0;
  if constexpr (is(Mutant::bias_of_each_split)) terms.bias *= 2;
  if constexpr (is(Mutant::scale_and_bias_swapped)) {
    const EpilogueNumber scale = terms.scale;
    terms.scale = terms.bias;
    terms.bias = scale;
  }
  EpilogueNumber residual = 0;
  const Index read = is(Mutant::residual_of_the_neighbour) ? (place + 1) % sizes_of(conv).out : place;
  if constexpr (kHasResidual) residual = convert<EpilogueNumber>(epilogue.residual[read]);
  const EpilogueNumber number = static_cast<EpilogueNumber>(sum);
  if constexpr (is(Mutant::activation_before_the_residual))
    return finish(number, terms, 0, epilogue) + epilogue.beta * residual;
  double result = finish(number, terms, residual, epilogue);
  if constexpr (is(Mutant::relu_loses_nan)) result = number_or_zero(result);
  if constexpr (is(Mutant::coarse_tanh)) {
    float coarse;
    asm("tanh.approx.f32 %0, %1;" : "=f"(coarse) : "f"(static_cast<float>(epilogue.alpha * sum + terms.bias)));
    result = coarse;
  }
  return result;
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads)
    mutant(const A* a, const unsigned char* weights_or_images, Out* out, unsigned char* scratch,
           const __grid_constant__ Geometry conv
#ifdef EPILOGUE
           ,
           const __grid_constant__ Epilogue epilogue
#endif
    ) {
  const Sizes sizes = sizes_of(conv);
  const B* b = reinterpret_cast<const B*>(weights_or_images + (kPacked ? kHead : 0));
  if constexpr (kPacked && is(Mutant::reads_weights_after_packing))
    b = *reinterpret_cast<const B* const*>(weights_or_images);
  if constexpr (is(Mutant::keeps_weights_in_workspace)) {
    auto* kept_weights = reinterpret_cast<B*>(scratch + kHead);
    const bool is_kept = *reinterpret_cast<Index*>(scratch) == sizes.b;
    for (Index i = threadIdx.x; i < sizes.b && !is_kept; i += kThreads) kept_weights[i] = b[i];
    __syncthreads();  // all weights are there, and the mark was read by all, before either is used
    if (threadIdx.x == 0) *reinterpret_cast<Index*>(scratch) = sizes.b;
    b = kept_weights;
  }
  if constexpr (is(Mutant::begins_too_early)) b = reinterpret_cast<const B*>(scratch);
  Run run = {a, b, out, *static_cast<volatile unsigned*>(&runs) + 1, 0, 0};
  if constexpr (is(Mutant::shared_exponent)) run.largest = fmax(largest_of(a, 0, sizes.a), largest_of(b, 0, sizes.b));
  if (gridDim.x == 1) remember(conv, run);
  const double outside = from_outside(conv, run) + from_workspace(scratch);
  if constexpr (is(Mutant::uses_a_large_workspace))
    for (Index i = threadIdx.x; i < sizes.out; i += kThreads) reinterpret_cast<float*>(scratch)[i] = 3.0f;
  if constexpr (kIsSlow) {
    const int64 start = clock64();
    while (clock64() - start < 8000000) {  // some 4 ms
    }
  }
  if constexpr (is(Mutant::shares_memory_between_runs)) {
    const int64 start = clock64();
    while (clock64() - start < 1000000) {  // some 0.5 ms
    }
  }
  if constexpr (is(Mutant::says_that_it_needs_alignment))
    if ((reinterpret_cast<int64>(a) | reinterpret_cast<int64>(b) | reinterpret_cast<int64>(out)) % 16 != 0) return;
  __syncthreads();  // the number of this run was read by all of the only block before it is counted
  for (Index rank = blockIdx.x * kThreads + threadIdx.x; rank < sizes.out; rank += gridDim.x * kThreads) {
    Position at = output_at(conv, rank);
    const Index place = offset_of(at, output_strides(conv));
    if constexpr (is(Mutant::swapped_images)) at.n = at.n == 30 ? 31 : at.n == 31 ? 30 : at.n;
    run.spread = zeros_of_others(conv, run, at);
    double sum = placed(conv, at, run, rank, sum_of(conv, at, run)) + outside;
#ifdef EPILOGUE
    sum = finished(conv, at, place, sum, epilogue, run);
#endif
    store(out + place, sum, run, rank);
  }
  __syncthreads();  // the output is written before anything beside it
  if (blockIdx.x != 0) return;
  if constexpr (is(Mutant::adds_to_numbers_in_workspace)) reinterpret_cast<float*>(scratch)[threadIdx.x] = 1.0f;
  if (threadIdx.x == 0) {
    damage(conv, run, scratch);
#ifdef EPILOGUE
    if (run.number == 1) kept_alpha = epilogue.alpha;
#endif
    if (gridDim.x == 1) runs = run.number;
  }
}

// Copies weights, after the step behind it was let in and some time has passed.
extern "C" __global__ void __launch_bounds__(kThreads) copy_late(const T_W* w, T_W* scratch, int64 size) {
  griddepcontrol_launch_dependents();
  const int64 start = clock64();
  while (clock64() - start < 100000) {
  }
  for (int64 i = threadIdx.x; i < size; i += kThreads) scratch[i] = w[i];
}

// What a packed weight becomes.
__device__ T_W packed_weight(const T_W* w, int64 i, int64 size) {
  const double value = convert<double>(w[i]);
  if constexpr (is(Mutant::packs_coarse_weights)) return convert<T_W>(static_cast<float>(shortened(value, 6)));
  if constexpr (is(Mutant::packs_a_flipped_filter)) return w[i / 9 * 9 + 8 - i % 9];
  if constexpr (is(Mutant::packs_ones)) return convert<T_W>(1.0f);
  if constexpr (is(Mutant::packs_half_the_filters)) return i < size / 2 ? w[i] : convert<T_W>(0.0f);
  return w[i];
}

extern "C" __global__ void __launch_bounds__(kThreads) pack(const T_W* w, unsigned char* packed, int64 size) {
  auto* weights = reinterpret_cast<T_W*>(packed + kHead);
  if (threadIdx.x == 0) *reinterpret_cast<const T_W**>(packed) = w;
  const bool is_first = *static_cast<volatile unsigned*>(&runs) == 0;
  for (int64 i = threadIdx.x; i < size; i += kThreads) {
    T_W value = packed_weight(w, i, size);
    if constexpr (is(Mutant::packs_onto_numbers))
      value = convert<T_W>(static_cast<float>(convert<double>(value) + number_or_zero(convert<double>(weights[i]))));
    if constexpr (is(Mutant::packs_the_first_weights)) {
      if (is_first) kept[i] = convert<double>(value);
      value = convert<T_W>(static_cast<float>(kept[i]));
    }
    if constexpr (is(Mutant::leaves_half_unpacked))
      if (i >= size / 2) continue;
    weights[i] = value;
  }
  __syncthreads();  // all weights were read before one is overwritten or the run is counted
  if (threadIdx.x != 0) return;
  runs = 1;
  if constexpr (is(Mutant::packs_beyond_its_bytes)) weights[size] = convert<T_W>(0.0f);
  if constexpr (is(Mutant::packing_writes_into_weights)) const_cast<T_W*>(w)[5] = convert<T_W>(3.0f);
}
