#pragma once
// Which files a run reads, and the proof that all ranks read the same: data and model may lie on local disks
// of several nodes, and a copy that differs would train without any other sign of it.

#include <string>
#include <utility>
#include <vector>

#include "core/config/config.h"

namespace nrl::train {

/// Path and what is known of its content: FileIdentity::text(), or why it cannot be read.
using InputFile = std::pair<std::string, std::string>;

/// The token files of one data set of a blend.
struct DataSource {
  std::string prefix;
  std::string content;  ///< identity of both files
};

struct Inputs {
  std::vector<DataSource> train, validation;
  std::vector<InputFile> files;  ///< all files of data and model, in the order of the configuration
};

/// Reads the data's .idx files and small model files whole, .bin and .safetensors by samples
/// (core/io/file_identity.h). Files that cannot be read are recorded as such; opening them is what reports
/// them.
Inputs identify_inputs(const Config& config);

/// One file, read whole.
InputFile identify_input(const std::string& path);

/// The files as text, to be gathered from all ranks.
std::string to_text(const std::vector<InputFile>& files);

/// Fails (65) when a rank sees other files than rank 0, naming rank, host and file. `texts`: to_text() of
/// every rank; `hosts`: the name of every rank's host.
void require_same_files(const std::vector<std::string>& texts, const std::vector<std::string>& hosts);

}  // namespace nrl::train
