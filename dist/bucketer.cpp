#include "dist/bucketer.h"

#include <algorithm>

#include "runtime/error.h"

namespace detr::dist {

Bucketer::Bucketer(Communicator& communicator, Layout layout, const Tensor& grads, const Stream& stream, std::int64_t extras, Milliseconds timeout)
    : communicator_(&communicator), layout_(std::move(layout)), grads_(grads), stream_(stream.lasting()), timeout_(timeout) {
  expect_tensor(grads, "bucketer: grads", grads, {layout_.total}, layout_.dtype);
  DETR_CHECK(grads.device() == stream.device(), "bucketer: grads on ", grads.device(), ", the stream on ", stream.device());
  DETR_CHECK(extras >= 0 && timeout.count() > 0, "bucketer: ", extras, " extras, timeout ", timeout.count(), " ms");
  trailer_ = stream_.zeros({count() + extras}, DType::f64);
  sent_ = stream_.empty_host({count()}, DType::f64);
  std::ranges::fill(sent_.span<double>(), -1.0);   // no real value: the first step copies
}

void Bucketer::begin(std::int64_t step) {
  DETR_CHECK(!in_step_, "bucketer: step ", step, " begins before step ", step_, " is finished");
  DETR_CHECK(step >= 0, "bucketer: step ", step);
  step_ = step;
  in_step_ = true;
  marks_.assign(layout_.parameters.size(), Mark::none);
  used_.assign(layout_.parameters.size(), 0.0);
  waiting_.clear();
  for (const Bucket& bucket : layout_.buckets) waiting_.push_back(bucket.parameters.size());
  next_ = 0;
  works_.clear();
}

void Bucketer::expect_in_step(int parameter) const {
  DETR_CHECK(parameter >= 0 && parameter < count(), "bucketer: parameter ", parameter, " of ", count());
  DETR_CHECK(in_step_, "bucketer: the gradient of ", layout_.parameters[static_cast<std::size_t>(parameter)].name, " comes outside of a step");
}

void Bucketer::mark_used(int parameter) {
  expect_in_step(parameter);
  used_[static_cast<std::size_t>(parameter)] = 1.0;
}

void Bucketer::mark_missing(int parameter) { mark(parameter, Mark::missing); }

void Bucketer::mark_ready(int parameter) {
  mark(parameter, Mark::ready);
  used_[static_cast<std::size_t>(parameter)] = 1.0;
}

void Bucketer::mark(int parameter, Mark mark) {
  expect_in_step(parameter);
  const auto i = static_cast<std::size_t>(parameter);
  DETR_CHECK(marks_[i] == Mark::none, "bucketer: step ", step_, ": the gradient of ", layout_.parameters[i].name,
             marks_[i] == Mark::missing ? " was reported missing" : " was reported complete", " before");
  marks_[i] = mark;
  --waiting_[static_cast<std::size_t>(layout_.bucket_of[i])];
  while (next_ < waiting_.size() && waiting_[next_] == 0) issue_bucket();
}

void Bucketer::issue(const Tensor& tensor, std::int64_t slot, const std::string& what) {
  const auto tag = static_cast<std::uint64_t>(step_ * plan_length() + slot);
  works_.push_back(communicator_->all_reduce_sum(stream_, tensor, {tag, concat(what, " of step ", step_)}));
}

void Bucketer::issue_bucket() {
  const Bucket& bucket = layout_.buckets[next_];
  issue(grads_.slice(bucket.begin, bucket.end), static_cast<std::int64_t>(next_), concat("bucket ", next_));
  ++next_;
}

/// The used bits go to the trailer. Their copy on the host is left alone where it has them already: copies that are under way, and
/// captured graphs, read it.
void Bucketer::write_used() {
  const auto sent = sent_.span<double>();
  if (!std::ranges::equal(sent, used_)) {
    copied_.wait();
    std::ranges::copy(used_, sent.begin());
  }
  Tensor to = used();
  stream_.copy(sent_, to);
  copied_ = stream_.record();
}

void Bucketer::finish() {
  DETR_CHECK(in_step_, "bucketer: finish() without begin()");
  in_step_ = false;
  while (next_ < layout_.buckets.size()) issue_bucket();
  write_used();
  issue(trailer_, plan_length() - 1, "trailer");
  const Clock::time_point deadline = Clock::now() + timeout_;
  for (const std::shared_ptr<Work>& work : works_) work->wait(stream_, deadline);
  works_.clear();
}

std::vector<int> Bucketer::unused_everywhere() const {
  DETR_CHECK(!in_step_, "bucketer: the mask is known after finish()");
  const Tensor counts = stream_.to_host(used());
  std::vector<int> unused;
  for (std::int64_t i = 0; i < count(); ++i) {
    if (counts.data<double>()[i] == 0.0) unused.push_back(static_cast<int>(i));
  }
  return unused;
}

}  // namespace detr::dist
