// The functions of a processor that multiplies bfloat16. Included once, with AVX-512, after
// few_rows_pairs.h and many_rows_pairs.h.

// Where queries and cache have at most the precision of bfloat16: then the products of queries and
// keys are exact, and weights are rounded no more than the outputs are.
static bool is_paired(const AttentionCall& call) {
  return call.query.format == Format::kBFloat16 && call.keys.format >= Format::kBFloat16;
}

static int64_t paired_scratch_floats(const AttentionCall& call, const WorkItem& item) {
  return Layout(call, item, is_paired(call)).end;
}

static void paired_attend(const AttentionCall& call, const WorkItem& item, float* scratch,
                          float* partials) {
  if (!is_paired(call)) return attend(call, item, scratch, partials);
  ItemRows rows(call, item, true, scratch, partials);
  switch (call.keys.format) {
    case Format::kE4M3: attend<Paired, PairedTile, E4M3>(rows, scratch); break;
    case Format::kE5M2: attend<Paired, PairedTile, E5M2>(rows, scratch); break;
    default: attend<Paired, PairedTile, BFloat16>(rows, scratch);
  }
  rows.end_item();
}

constexpr Functions kBFloat16Functions{paired_scratch_floats, paired_attend, merge, write};
