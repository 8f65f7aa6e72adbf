// Collectives of npu tensors.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace emulated {

// The backend "hccl", which passes aliases of npu tensors to a gloo backend with the same ranks.
c10::intrusive_ptr<c10d::Backend> make_hccl(c10d::Backend& gloo);

} // namespace emulated
