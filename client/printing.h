// Output for people (tables) and for scripts (protobuf JSON, one object a line).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "google/protobuf/message.h"
#include "proto/job.pb.h"
#include "proto/types.pb.h"

namespace tandem {

// One line of JSON with proto field names; default values included.
std::string ToJson(const google::protobuf::Message& message);
// To stdout, as Printable has it: a completion or a name moves no terminal.
void Print(const std::string& line);
void PrintPiece(std::string_view text);  // of a line
// Columns padded to their widest cell; the first row is the heading.
std::string FormatTable(const std::vector<std::vector<std::string>>& rows);
// Memory by owner, largest first, with a total of what lies in the pool.
std::string FormatLedger(const google::protobuf::RepeatedPtrField<v1::OwnedBytes>& ledger);
// A job's memory by owner in both phases, what the node holds at most, and what to ask for.
std::string FormatMemoryPlan(const v1::MemoryPlan& plan);
// "data: 7473 rows: 6973 trained, 500 held out, ...".
std::string FormatDataCounts(const v1::DataCounts& counts);
// Texts beside each other, each wrapped at words to `width` characters (code points), `gap` spaces between.
std::string FormatColumns(const std::vector<std::string>& texts, std::size_t width, std::size_t gap);
// A row of `tandem compare` as JSON: name, a and b under `kind`.
std::string FormatComparison(const std::vector<std::string>& row, const std::string& kind);
// "STATE_RUNNING" with its prefix removed, in lower case.
std::string EnumWord(const std::string& name, const std::string& prefix);

}  // namespace tandem
