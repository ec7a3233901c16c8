// main JOB RESULT: runs the launches that the job names on its buffers, and writes the buffers back.
//   job     u32 seed, u32 buffers, per buffer u64 bytes and the bytes; u32 launches, per launch u32 kernel (0: merge, else
//           rows of partial), 3 u32 grid, u32 threads, u32 shared bytes, u32 arguments, per argument u32 kind (0 buffer, 1 int, 2 float), u32 value
//   result  the buffers, in order
#include "emulate.h"
static unsigned char* raw;  // a block's dynamic shared memory, of the size that the launch asks for
#include SOURCE


static FILE* file;
template <class V> static V read() {
  V v;
  if (fread(&v, sizeof v, 1, file) != 1) { fprintf(stderr, "the job file ends too early\n"); exit(2); }
  return v;
}

int main(int, char** argv) {
  file = fopen(argv[1], "rb");
  if (!file) { perror(argv[1]); return 2; }
  shuffle_engine.seed(read<uint32_t>());
  std::vector<std::pair<void*, size_t>> buffers(read<uint32_t>());
  for (auto& [data, bytes] : buffers) {
    bytes = read<uint64_t>();
    data = malloc(bytes);  // the exact size, so that the sanitizer sees its end
    if (bytes && fread(data, bytes, 1, file) != 1) return 2;
  }
  for (uint32_t n = read<uint32_t>(); n--;) {
    uint32_t kernel = read<uint32_t>(), x = read<uint32_t>(), y = read<uint32_t>(), z = read<uint32_t>(), threads = read<uint32_t>(), shared = read<uint32_t>();
    struct Arg { uint32_t kind, value; };
    std::vector<Arg> args(read<uint32_t>());
    for (auto& a : args) a.kind = read<uint32_t>(), a.value = read<uint32_t>();
    size_t i = 0;
    auto pointer = [&] { return buffers.at(args.at(i++).value).first; };
    auto integer = [&] { return (int)args.at(i++).value; };
    auto real = [&] { return bits<float>(args.at(i++).value); };
    std::function<void()> call;
    if (kernel) {
      Q* q = (Q*)pointer();
      KV* kv = (KV*)pointer();
      Index* indices = (Index*)pointer();
      i64* starts = (i64*)pointer();
      int* lens = (int*)pointer();
      u32* words = (u32*)pointer();
      int* node_starts = (int*)pointer();
      float *part_out = (float*)pointer(), *part_lse = (float*)pointer(), scale = real();
      int a = integer(), b = integer(), heads = integer(), max_rows = integer(), splits = integer(), width = integer(),
          max_splits = integer(), min_split = integer();
      auto run = kernel == 16 ? partial_16 : kernel == 32 ? partial_32 : partial_64;
      call = [=] { run(q, kv, indices, starts, lens, words, node_starts, part_out, part_lse, scale, a, b, heads, max_rows, splits, width, max_splits, min_split); };
    } else {
      std::vector<std::pair<void*, std::vector<char>>> written;
      for (int k : {0, 1}) {  // the partial results
        auto& [data, bytes] = buffers.at(args.at(k).value);
        written.emplace_back(data, std::vector<char>((char*)data, (char*)data + bytes));
        memset(data, 0xff, bytes);
      }
      launch_before = [written] {
        for (auto& [data, bytes] : written) memcpy(data, bytes.data(), bytes.size());
      };
      float *part_out = (float*)pointer(), *part_lse = (float*)pointer();
      int *lens = (int*)pointer(), *node_starts = (int*)pointer();
      Q* out = (Q*)pointer();
      float *lse = (float*)pointer(), scale = real();
      int a = integer(), b = integer(), heads = integer(), max_rows = integer(), splits = integer(), max_splits = integer(), min_split = integer();
      call = [=] { merge(part_out, part_lse, lens, node_starts, out, lse, scale, a, b, heads, max_rows, splits, max_splits, min_split); };
    }
    if (posix_memalign((void**)&raw, 128, std::max(shared, 16u))) return 2;  // the exact size, as above
    gridDim = {(int)x, (int)y, (int)z};
    for (blockIdx.z = 0; blockIdx.z < (int)z; ++blockIdx.z)
      for (blockIdx.y = 0; blockIdx.y < (int)y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < (int)x; ++blockIdx.x) {
          memset(raw, 0xff, shared);
          body = call;
          run_block((int)threads);
        }
    free(raw);
    wait_for_launch_before();
  }
  FILE* out = fopen(argv[2], "wb");
  if (!out) { perror(argv[2]); return 2; }
  for (auto& [data, bytes] : buffers) fwrite(data, 1, bytes, out);
  return fclose(out) ? 2 : 0;
}
