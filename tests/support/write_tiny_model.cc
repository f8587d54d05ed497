// Writes the tiny model of the system tests, for tests that are scripts.
//
//   tandem_tiny_model DIRECTORY
#include <iostream>

#include "tests/support/tiny_model.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: tandem_tiny_model DIRECTORY\n";
    return 1;
  }
  const absl::StatusOr<std::string> written = tandem::WriteTinyModel(argv[1], tandem::TinyModelOptions());
  if (written.ok()) return 0;
  std::cerr << written.status() << "\n";
  return 1;
}
