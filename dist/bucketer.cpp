#include "dist/bucketer.h"

#include <algorithm>

#include "runtime/error.h"

namespace detr::dist {

void expect_planned(int rank, const Place& place, std::int64_t slot, std::int64_t planned, std::int64_t given) {
  if (given != planned) throw CommError("rank ", rank, ": ", place.phase, ": slot ", slot, " of the plan has ", planned, " values, and ", given, " are to be sent");
}

void expect_in_order(int rank, const Place& place, std::int64_t slot, std::int64_t due) {
  if (slot != due) throw CommError("rank ", rank, ": ", place.phase, ": slot ", slot, " of the plan is to be sent where slot ", due, " is due");
}

Bucketer::Bucketer(Communicator& communicator, Layout layout, const Tensor& grads, const Stream& stream, BucketerOptions options)
    : communicator_(&communicator), layout_(std::move(layout)), options_(std::move(options)), grads_(grads), stream_(stream.lasting()) {
  expect_tensor(grads, "bucketer: grads", grads, {layout_.total}, layout_.dtype);
  DETR_CHECK(grads.device() == stream.device(), "bucketer: grads on ", grads.device(), ", the stream on ", stream.device());
  DETR_CHECK(options_.extras >= 0 && options_.slots_before >= 0 && options_.timeout.count() > 0, "bucketer: ", options_.extras, " extras, ", options_.slots_before,
             " slots before, timeout ", options_.timeout.count(), " ms");
  const std::vector<int>& before = options_.exchanges_before;
  DETR_CHECK((before.empty() || before.size() == layout_.buckets.size()) && std::ranges::is_sorted(before) && (before.empty() || before.front() >= 0),
             "bucketer: the exchanges before each of ", layout_.buckets.size(), " buckets must not fall");
  trailer_ = stream_.zeros({count() + options_.extras}, DType::f64);
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
  exchanges_ = 0;
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
  issue_due();
}

void Bucketer::exchange(const std::function<void()>& issue) {
  DETR_CHECK(in_step_, "bucketer: an exchange of backward outside of a step");
  if (next_ < waiting_.size() && exchanges_before(next_) <= exchanges_) {
    for (const int p : layout_.buckets[next_].parameters) {
      DETR_CHECK(marks_[static_cast<std::size_t>(p)] != Mark::none, "bucketer: step ", step_, ": the gradient of ", layout_.parameters[static_cast<std::size_t>(p)].name,
                 " is not complete before exchange ", exchanges_, " of backward, as it was when the order was fixed");
    }
  }
  issue();
  ++exchanges_;
  issue_due();
}

void Bucketer::issue_due() {
  while (next_ < waiting_.size() && waiting_[next_] == 0 && exchanges_before(next_) <= exchanges_) issue_bucket();
}

void Bucketer::issue(const Tensor& tensor, std::int64_t slot, std::int64_t planned, const std::string& what) {
  const Place place{tag(options_.slots_before + slot), concat(what, " of step ", step_)};
  expect_in_order(communicator_->rank(), place, options_.slots_before + slot, options_.slots_before + std::ssize(works_));
  expect_planned(communicator_->rank(), place, options_.slots_before + slot, planned, tensor.numel());
  works_.push_back(communicator_->all_reduce_sum(stream_, tensor, place));
}

void Bucketer::issue_bucket() {
  if (before_bucket) before_bucket(static_cast<int>(next_));
  auto index = static_cast<int>(next_);
  if (index == fault_.swap_a) index = fault_.swap_b;
  else if (index == fault_.swap_b) index = fault_.swap_a;
  DETR_CHECK(index >= 0 && index < std::ssize(layout_.buckets), "bucketer: there is no bucket ", index, " to send in place of ", next_);
  const Bucket& bucket = layout_.buckets[static_cast<std::size_t>(index)];
  const std::int64_t end = index == fault_.shorten ? (bucket.begin + bucket.end) / 2 : bucket.end;
  issue(grads_.slice(bucket.begin, end), index, bucket.end - bucket.begin, concat("bucket ", index));
  ++next_;
}

/// The used bits go to the trailer, on a GPU from a copy that the device has: few patterns occur, and a captured step may not read memory
/// of the host that another step writes.
void Bucketer::write_used() {
  if (stream_.is_planning()) return;
  Tensor to = used();
  if (stream_.device().is_cpu()) {
    std::ranges::copy(used_, to.span<double>().begin());
    return;
  }
  Tensor& bits = used_on_device_[used_];
  if (!bits.defined()) {
    bits = stream_.to_device(host_tensor<double>({count()}, used_));
    stream_.wait();   // the host's tensor goes
  }
  stream_.copy(bits, to);
}

void Bucketer::finish() {
  DETR_CHECK(in_step_, "bucketer: finish() without begin()");
  while (next_ < layout_.buckets.size()) issue_bucket();
  in_step_ = false;
  write_used();
  issue(trailer_, static_cast<std::int64_t>(layout_.buckets.size()), count() + options_.extras, "trailer");
  const Clock::time_point deadline = Clock::now() + options_.timeout;
  for (const std::shared_ptr<Work>& work : works_) work->wait(stream_, deadline);
  works_.clear();
}

}  // namespace detr::dist
