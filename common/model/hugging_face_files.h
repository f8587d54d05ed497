// The files of a Hugging Face directory that say what a model is, made from plain values: the inverse of reading one.
#pragma once

#include <map>
#include <string>

#include "common/model/model_config.h"
#include "common/model/tokenizer.h"

namespace tandem {

// config.json of a model in bf16.
std::string HuggingFaceConfigText(const ModelConfig& config);
// tokenizer.json and tokenizer_config.json, by name. TokenizerSpecFromJson gives the spec again.
std::map<std::string, std::string> HuggingFaceTokenizerFiles(const TokenizerSpec& spec);

}  // namespace tandem
