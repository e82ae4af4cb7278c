#pragma once
// Identifies the input files of a run and checks that all ranks read the same ones: data and model may be on
// local disks of several nodes, and training on differing copies would go unnoticed.

#include <string>
#include <utility>
#include <vector>

#include "core/config/config.h"

namespace nrl::train {

/// Path and identity of the content: FileIdentity::text(), or why it cannot be read.
using InputFile = std::pair<std::string, std::string>;

/// The token files of one dataset of a blend.
struct DataSource {
  std::string prefix;
  std::string content;  ///< identity of both files
};

struct Inputs {
  std::vector<DataSource> train, validation;
  std::vector<InputFile> files;  ///< all files of data and model, in the order of the configuration
};

/// Hashes .idx files and small model files completely, .bin and .safetensors by samples
/// (core/io/file_identity.h). Unreadable files are recorded as such; opening them later reports the error.
Inputs identify_inputs(const Config& config);

/// The files of policy.model_name alone; empty for a model from scratch.
std::vector<InputFile> identify_model(const Config& config);

/// Where the files lie (device, number, size and time of change), without reading them: two ranks of a host
/// for which this is equal read the same files. They may not: the ranks' directories or mounts may differ.
std::string places_of_inputs(const Config& config);

/// Identifies one file by its complete content.
InputFile identify_input(const std::string& path);

/// The files as text, for gathering from all ranks, and what identify_inputs() returned where they were read.
std::string to_text(const std::vector<InputFile>& files);
Inputs inputs_from_text(const Config& config, const std::string& text);

/// Fails (65) if a rank sees other files than rank 0, naming rank, host and file. `texts`: to_text() of every
/// rank that has read them, empty for the others; `hosts`: the host name of every rank.
void require_same_files(const std::vector<std::string>& texts, const std::vector<std::string>& hosts);

}  // namespace nrl::train
