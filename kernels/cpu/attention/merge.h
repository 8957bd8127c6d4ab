// Normalises sums to outputs, and merges partials. Included once per instruction set, after softmax.h.

// Writes an output row from its sums [head_dim], which it overwrites.
static void write_output(const AttentionCall& call, int64_t token, int64_t head, RowState state,
                         float* sums) {
  float factor = call.values.scale;
  if (state.total == 0.0f) {
    factor = 0.0f;  // the row has seen no key
  } else if (call.sinks != nullptr) {
    const float top = state.maximum > call.sinks[head] ? state.maximum : call.sinks[head];
    const float share = std::exp(state.maximum - top);
    factor *= share / (state.total * share + std::exp(call.sinks[head] - top));
  } else {
    factor /= state.total;
  }
  const int64_t dim = call.values.head_dim;
  for (int64_t d = 0; d < dim; d += kLanes) store(sums + d, load(sums + d) * factor);
  char* out = static_cast<char*>(call.out.data) +
              (token * call.out.token_stride + head * call.out.head_stride) *
                  bytes_of(call.out.format);
  narrow_row(call.out.format, sums, out, dim);
}

// A row of a partial: its sums, then maximum and total.
QUIRE_INLINE int64_t partial_stride(const AttentionCall& call) {
  return padded(call.values.head_dim) + 2;
}

// Writes an output row from `count` partials, the first of which is at `partial`.
static void merge_row(const AttentionCall& call, int64_t token, int64_t head, const float* partial,
                      int64_t count, int64_t partial_floats, float* sums) {
  const int64_t width = partial_stride(call) - 2;
  const auto state_of = [&](int64_t part) {
    RowState state;
    std::memcpy(&state, partial + part * partial_floats + width, sizeof state);
    return state;
  };
  RowState all{kMinusInfinity, 0.0f};
  for (int64_t part = 0; part < count; ++part) {
    all.maximum = std::max(all.maximum, state_of(part).maximum);
  }
  for (int64_t part = 0; part < count; ++part) {
    const RowState state = state_of(part);
    if (state.total == 0.0f) continue;
    const bool is_first = all.total == 0.0f;
    const float factor = state.maximum == all.maximum
                             ? 1.0f
                             : exponential(broadcast(state.maximum - all.maximum))[0];
    all.total += state.total * factor;
    const float* from = partial + part * partial_floats;
    for (int64_t d = 0; d < width; d += kLanes) {
      const Floats product = load(from + d) * factor;
      store(sums + d, is_first ? product : load(sums + d) + product);
    }
  }
  // No key has been seen.
  if (all.total == 0.0f) std::memset(sums, 0, width * sizeof(float));
  write_output(call, token, head, all, sums);
}

static void merge(const AttentionCall& call, const WorkItem& item, float* scratch,
                  const float* partials) {
  const int64_t group = call.group_size(), rows = item.num_tokens * group;
  const int64_t count = item.num_partitions();
  const float* partial = partials + item.partials_at;
  for (int64_t head = 0; head < item.num_heads; ++head) {
    for (int64_t row = 0; row < rows; ++row, partial += partial_stride(call)) {
      const int64_t token = call.query_start_loc[item.seq] + item.first_token + row / group;
      merge_row(call, token, (item.first_head + head) * group + row % group, partial, count,
                item.partial_floats, scratch);
    }
  }
}
