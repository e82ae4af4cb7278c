#include "parallel/context/passes.h"

namespace nrl::parallel::context {
namespace {

comm::View view(const Tensor& t) {
  NRL_CHECK(t.contiguous());
  return {t.data, t.numel(), t.dtype};
}

}  // namespace

comm::Handle Traffic::shift(const Tensor& send, const Tensor& receive, int tag) const {
  const int n = group_->size(), r = group_->rank();
  return group_->exchange_async({comm::Message::send(view(send), (r + 1) % n, tag),
                                 comm::Message::recv(view(receive), (r + n - 1) % n, tag)},
                                stream_);
}

void Traffic::all_gather(const Tensor& own, const Tensor& all) const {
  group_->all_gather_async(view(own), view(all), stream_).wait();
}

void Traffic::reduce_scatter(const Tensor& all, const Tensor& own) const {
  group_->reduce_scatter_async(view(all), view(own), comm::Reduce::sum, stream_).wait();
}

void Traffic::all_to_all(const Tensor& in, const Tensor& out) const {
  group_->all_to_all_async(view(in), view(out), stream_).wait();
}

}  // namespace nrl::parallel::context
