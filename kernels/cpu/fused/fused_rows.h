// Fused elementwise operations. Included once per instruction set, by isa/foreach_isa.h.
#include "isa/formats.h"

#include "isa/activations.h"

// Calls `lanes(from, count)` for each kLanes numbers; only the last count may be smaller.
template <typename Visit>
QUIRE_INLINE void for_lanes(int64_t size, Visit lanes) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) lanes(i, static_cast<int64_t>(kLanes));
  if (i < size) lanes(i, size - i);
}

template <typename T>
QUIRE_INLINE Floats load_some(const T* from, int64_t count) {
  return count == kLanes ? load(from) : load_first(from, count);
}

template <typename T>
QUIRE_INLINE void store_some(T* to, Floats x, int64_t count) {
  if (count == kLanes)
    store(to, x);
  else
    store_first(to, x, count);
}

// 1 / sqrt(mean(x^2) + epsilon)
template <typename T>
QUIRE_INLINE float norm_factor(const T* x, int64_t dim, float epsilon) {
  Floats squares{};
  for_lanes(dim, [&](int64_t i, int64_t count) {
    const Floats some = load_some(x + i, count);
    squares += some * some;
  });
  return 1.0f / std::sqrt(sum(squares) / dim + epsilon);
}

// x / sqrt(mean(x^2) + epsilon) * weight, row by row.
template <typename T>
static void norm_rows(const Norm& call, int64_t first_row, int64_t end_row) {
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* source = static_cast<const T*>(call.source) + row * call.dim;
    T* out = static_cast<T*>(call.out) + row * call.dim;
    const float factor = norm_factor(source, call.dim, call.epsilon);
    for_lanes(call.dim, [&](int64_t i, int64_t count) {
      const Floats x = load_some(source + i, count);
      store_some(out + i, x * factor * load_some(call.weight + i, count), count);
    });
  }
}

// activation(gate) * up
template <typename T>
static void gate_rows(const Gate& call, int64_t first, int64_t end) {
  const T* gate = static_cast<const T*>(call.gate) + first;
  const T* up = static_cast<const T*>(call.up) + first;
  T* out = static_cast<T*>(call.out) + first;
  for_lanes(end - first, [&](int64_t i, int64_t count) {
    const Floats x = load_some(gate + i, count);
    store_some(out + i, activated(call.activation, x) * load_some(up + i, count), count);
  });
}

// Rotary embedding: number i of the first half is rotated with number i of the second.
template <typename T>
static void rope_tokens(const Rope& call, int64_t first_token, int64_t end_token) {
  const int64_t half = call.dim / 2;
  for (int64_t token = first_token; token < end_token; ++token) {
    const T* cosines = static_cast<const T*>(call.cosines) + token * call.dim;
    const T* sines = static_cast<const T*>(call.sines) + token * call.dim;
    for (int64_t head = 0; head < call.num_heads; ++head) {
      const T* source = static_cast<const T*>(call.source.data) +
                        token * call.source.token_stride + head * call.source.head_stride;
      T* out = static_cast<T*>(call.out.data) + token * call.out.token_stride +
               head * call.out.head_stride;
      const float* norm = call.norms ? call.norms + head * call.dim : nullptr;
      const float factor = norm ? norm_factor(source, call.dim, call.epsilon) : 1.0f;
      for_lanes(half, [&](int64_t i, int64_t count) {
        Floats a = load_some(source + i, count);
        Floats b = load_some(source + half + i, count);
        if (norm) {
          a *= factor * load_some(norm + i, count);
          b *= factor * load_some(norm + half + i, count);
        }
        const auto at = [&](const T* table, int64_t j) { return load_some(table + j, count); };
        store_some(out + i, a * at(cosines, i) - b * at(sines, i), count);
        store_some(out + half + i, b * at(cosines, half + i) + a * at(sines, half + i), count);
      });
    }
  }
}

static void norm(const Norm& call, int64_t first, int64_t end) {
  visit_wide(call.format, [&](auto number) { norm_rows<decltype(number)>(call, first, end); });
}

static void gate(const Gate& call, int64_t first, int64_t end) {
  visit_wide(call.format, [&](auto number) { gate_rows<decltype(number)>(call, first, end); });
}

static void rope(const Rope& call, int64_t first, int64_t end) {
  visit_wide(call.source.format,
             [&](auto number) { rope_tokens<decltype(number)>(call, first, end); });
}

template <typename T>
static void widen_numbers(const Widen& call, int64_t first, int64_t end) {
  const T* source = static_cast<const T*>(call.source) + first;
  float* out = call.out + first;
  for_lanes(end - first, [&](int64_t i, int64_t count) {
    store_some(out + i, load_some(source + i, count), count);
  });
}

static void widen(const Widen& call, int64_t first, int64_t end) {
  visit_wide(call.format, [&](auto number) { widen_numbers<decltype(number)>(call, first, end); });
}

template <typename T>
static void sum_numbers(const Sum& call, int64_t first, int64_t end) {
  T* out = static_cast<T*>(call.out);
  for_lanes(end - first, [&](int64_t i, int64_t count) {
    const auto load_part = [&](int64_t part) {
      return load_some(static_cast<const T*>(call.parts[part]) + first + i, count);
    };
    Floats total = load_part(0);
    for (int64_t part = 1; part < call.num_parts; ++part) total += load_part(part);
    store_some(out + first + i, total, count);
  });
}

static void sum(const Sum& call, int64_t first, int64_t end) {
  visit_wide(call.format, [&](auto number) { sum_numbers<decltype(number)>(call, first, end); });
}

constexpr Functions kFunctions{norm, gate, rope, widen, sum};
