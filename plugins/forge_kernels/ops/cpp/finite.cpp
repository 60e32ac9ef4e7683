// forge::all_finite on the CPU: whether every entry of a list of tensors is finite. Its schema, its fake function and its
// reference are in finite.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>

namespace {

// Entries between two looks at what other threads have found: long enough to be vectorized, short enough to stop soon.
constexpr int64_t kBlock = 4096;

// NaN and infinity are the numbers whose exponent is all ones.
template <typename Bits>
bool has_bad(const void* data, int64_t begin, int64_t end, Bits exponent) {
  const Bits* entries = static_cast<const Bits*>(data);
  Bits bad = 0;
  for (int64_t i = begin; i < end; ++i) {
    bad |= static_cast<Bits>((entries[i] & exponent) == exponent);
  }
  return bad != 0;
}

bool has_bad(const at::Tensor& tensor, int64_t begin, int64_t end) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return has_bad<uint64_t>(tensor.const_data_ptr(), begin, end, 0x7ff0000000000000);
    case at::kFloat:
      return has_bad<uint32_t>(tensor.const_data_ptr(), begin, end, 0x7f800000);
    case at::kHalf:
      return has_bad<uint16_t>(tensor.const_data_ptr(), begin, end, 0x7c00);
    case at::kBFloat16:
      return has_bad<uint16_t>(tensor.const_data_ptr(), begin, end, 0x7f80);
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "forge::all_finite has no ", tensor.scalar_type());
  }
}

at::Tensor all_finite(at::TensorList tensors) {
  std::atomic<bool> bad{false};
  for (const at::Tensor& tensor : tensors) {
    // the order of entries does not matter, so only gaps and overlaps are copied away
    const at::Tensor dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
    at::parallel_for(0, dense.numel(), 8 * kBlock, [&](int64_t begin, int64_t end) {
      for (; begin < end && !bad.load(std::memory_order_relaxed); begin += kBlock) {
        if (has_bad(dense, begin, std::min(begin + kBlock, end))) {
          bad.store(true, std::memory_order_relaxed);
        }
      }
    });
    if (bad) {
      break;
    }
  }
  return at::scalar_tensor(!bad, at::kBool);
}

}  // namespace

TORCH_LIBRARY_IMPL(forge, CPU, library) {
  library.impl("all_finite", &all_finite);
}
