// The one symbol of ggml that llama.cpp's json.cpp needs: its assertions call it. It throws, so that a template that trips an
// assertion is refused like any other malformed template and the daemon goes on. Thread-safe.
#include <ggml.h>

#include <array>
#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

void ggml_abort(const char* file, int line, const char* format, ...) {
  std::array<char, 512> text{};
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text.data(), text.size(), format, arguments);
  va_end(arguments);
  throw std::logic_error(std::string(file) + ":" + std::to_string(line) + ": " + text.data());
}
