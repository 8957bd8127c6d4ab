// Attention of one item of work. Included once per instruction set, after packed.h and in_place.h.

template <typename T>
static void attend(Rows& rows, float* scratch) {
  rows.at.in_place ? InPlace<T>(rows, scratch).run() : Packed<T>(rows, scratch).run();
}

static void attend(const Attention& call, const Item& item, float* scratch, float* partials,
                   int64_t partial_floats) {
  Rows rows(call, item, scratch);
  switch (call.keys.format) {
    case Format::kFloat32: attend<float>(rows, scratch); break;
    case Format::kFloat16: attend<Float16>(rows, scratch); break;
    case Format::kBFloat16: attend<BFloat16>(rows, scratch); break;
    case Format::kE4M3: attend<E4M3>(rows, scratch); break;
    case Format::kE5M2: attend<E5M2>(rows, scratch); break;
  }
  rows.write(partials, partial_floats);
}
