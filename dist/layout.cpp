#include "dist/layout.h"

#include <set>

#include "runtime/error.h"

namespace detr::dist {

Layout make_layout(std::vector<ParameterSpec> parameters, const BucketCaps& caps) {
  DETR_CHECK(caps.first_bytes > 0 && caps.bytes > 0, "layout: caps must be positive, got ", caps.first_bytes, " and ", caps.bytes);
  std::set<std::string> names;
  Layout layout;
  if (!parameters.empty()) layout.dtype = parameters.front().dtype;
  for (const ParameterSpec& p : parameters) {
    DETR_CHECK(names.insert(p.name).second, "layout: two parameters named ", p.name);
    DETR_CHECK(p.dtype == layout.dtype, "layout: ", p.name, " is ", p.dtype, ", the others ", layout.dtype);
    DETR_CHECK(p.dtype == DType::f32 || p.dtype == DType::f64 || p.dtype == DType::bf16, "layout: ", p.name, " is ", p.dtype);
  }
  const std::int64_t item = size_of(layout.dtype), unit = 256 / item;
  layout.offsets.resize(parameters.size());
  layout.bucket_of.resize(parameters.size());
  Bucket open;
  const auto close = [&] {
    open.end = layout.total;
    layout.buckets.push_back(open);
    open = {layout.total, layout.total, {}};
  };
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    layout.offsets[i] = layout.total;
    layout.bucket_of[i] = static_cast<int>(layout.buckets.size());
    layout.total += (parameters[i].shape.numel() + unit - 1) / unit * unit;
    open.parameters.push_back(static_cast<int>(i));
    if ((layout.total - open.begin) * item >= (layout.buckets.empty() ? caps.first_bytes : caps.bytes)) close();
  }
  if (!open.parameters.empty()) close();
  layout.parameters = std::move(parameters);
  return layout;
}

}  // namespace detr::dist
