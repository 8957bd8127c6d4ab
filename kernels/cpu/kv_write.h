// New keys or values into the slots of their tokens. Included once per instruction set.

// Numbers are divided by the cache's scale as floats and then rounded; the same format with scale 1
// is copied.
static void write(const Write& call, int64_t first_token, int64_t end_token) {
  const Tokens& source = call.source;
  const Cache& cache = call.cache;
  const int64_t dim = cache.head_dim, source_bytes = bytes_of(source.format),
                cache_bytes = bytes_of(cache.format);
  const bool same = source.format == cache.format && cache.scale == 1.0f;
  // Head dimensions are small; one of any size goes through in pieces.
  constexpr int64_t kPiece = 256;
  float piece[kPiece];
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
      for (int64_t d = 0; d < dim; d += kPiece) {
        const int64_t count = dim - d < kPiece ? dim - d : kPiece;
        widen_row(source.format, from + d * source_bytes, piece, count, 1.0f);
        // Divided, as the definition says: a product with the reciprocal rounds otherwise.
        for (int64_t i = 0; i < padded(count); i += kLanes) {
          store(piece + i, load(piece + i) / cache.scale);
        }
        narrow_row(cache.format, piece, to + d * cache_bytes, count);
      }
    }
  }
}
