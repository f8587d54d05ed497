#include "common/torch/run_torch.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <exception>
#include <new>

namespace tandem {

absl::Status RunTorch(std::string_view what, absl::FunctionRef<absl::Status()> body) {
  const auto failed = [&](absl::StatusCode code, std::string_view words) {
    return absl::Status(code, absl::StrCat(ToAbsl(what), ": ", ToAbsl(words)));
  };
  try {
    const c10::AutoGradMode no_gradients(false);
    return body();
  } catch (const c10::OutOfMemoryError& error) {
    return failed(absl::StatusCode::kResourceExhausted, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return failed(absl::StatusCode::kInternal, error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return failed(absl::StatusCode::kResourceExhausted, "the heap has no memory left");
  } catch (const std::exception& error) { return failed(absl::StatusCode::kInternal, error.what()); }
}

}  // namespace tandem
