// The online softmax of a row. Included once per instruction set, after tile_shapes.h.

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// A range of keys, as offsets into their tile.
struct Span {
  int64_t begin, end;
};

// The running softmax of a row: weights are relative to the maximum.
struct RowState {
  float maximum, total;
};

QUIRE_INLINE Floats store_weights(float* to, Floats weights) {
  store(to, weights);
  return weights;
}

// Replaces the scores in `tile`, which is whole vectors, by weights; those outside `seen` become 0.
// Weights lie as an array of their own from `scores` on. Returns the factor for the sums so far, as
// the maximum may have risen.
//
// Rounded weights are also added up as such: then the outputs' weights add up to 1.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
template <typename Weight>
QUIRE_INLINE float update_softmax(float* scores, Span tile, Span seen, RowState& state) {
  auto* const weights = reinterpret_cast<Weight*>(scores);
  Floats most = broadcast(state.maximum);
  for (int64_t j = tile.begin; j < tile.end; j += kLanes) {
    Floats x = load(scores + j);
    if (j < seen.begin || j + kLanes > seen.end) {
      x = within(x, seen.begin - j, seen.end - j, kMinusInfinity);
      store(scores + j, x);
    }
    most = larger(x, most);
  }
  const float maximum = largest(most);
  // Where nothing has been seen, e^-inf is 0; -inf - -inf would be NaN.
  const float base = maximum == kMinusInfinity ? 0.0f : maximum;
  Floats totals{};
  for (int64_t j = tile.begin; j < tile.end; j += kLanes) {
    totals += store_weights(weights + j, exponential(load(scores + j) - base));
  }
  // Sums are zeros where nothing had been seen.
  const bool keep = state.maximum == maximum || state.total == 0.0f;
  const float factor = keep ? 1.0f : exponential(broadcast(state.maximum - base))[0];
  state = {maximum, state.total * factor + sum(totals)};
  return factor;
}
