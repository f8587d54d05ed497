// The text of live_page.html, as the build found it.
#pragma once

#include <string_view>

namespace tandem {

extern const std::string_view kLivePageDocument;

}  // namespace tandem
