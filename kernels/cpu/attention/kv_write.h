// Writes new keys or values into the slots of their tokens. Included once per instruction set.

// Numbers are divided by the cache's scale as floats and then rounded; numbers of the cache's format
// with scale 1 are copied.
static void write(const KvWrite& call, int64_t first_token, int64_t end_token) {
  const HeadsView& source = call.source;
  const Cache& cache = call.cache;
  const int64_t dim = cache.head_dim, source_bytes = bytes_of(source.format),
                cache_bytes = bytes_of(cache.format);
  const bool same = source.format == cache.format && cache.scale == 1.0f;
  // Heads of any dimension are converted through a buffer.
  constexpr int64_t kBuffer = 256;
  float buffer[kBuffer];
  for (int64_t token = first_token; token < end_token; ++token) {
    const int64_t slot = call.slot_mapping[token];
    if (slot < 0) continue;
    for (int64_t head = 0; head < call.num_heads; ++head) {
      const char* from = static_cast<const char*>(source.data) +
                         (token * source.token_stride + head * source.head_stride) * source_bytes;
      char* to = static_cast<char*>(cache.data) +
                 (slot / call.block_size * cache.block_stride +
                  slot % call.block_size * cache.slot_stride + head * cache.head_stride) *
                     cache_bytes;
      if (same) {
        std::memcpy(to, from, dim * cache_bytes);
        continue;
      }
      for (int64_t d = 0; d < dim; d += kBuffer) {
        const int64_t count = dim - d < kBuffer ? dim - d : kBuffer;
        widen_row(source.format, from + d * source_bytes, buffer, count, 1.0f);
        // Not multiplied with the reciprocal, which rounds differently.
        for (int64_t i = 0; i < padded(count); i += kLanes) {
          store(buffer + i, load(buffer + i) / cache.scale);
        }
        narrow_row(cache.format, buffer, to + d * cache_bytes, count);
      }
    }
  }
}
