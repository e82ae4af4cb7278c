# Summarizes `nvidia-smi dmon -s pc`: SM clock and power of the samples under load, i.e. above half the largest power.
$1 == "#" && $2 == "gpu" { for (i = 2; i <= NF; ++i) column[$i] = i - 1; next }
$1 ~ /^[0-9]+$/ && column["pwr"] && column["pclk"] && $column["pwr"] ~ /^[0-9]+$/ {
  watts[++n] = $column["pwr"] + 0
  clock[n] = $column["pclk"] + 0
  if (watts[n] > most) most = watts[n]
}
END {
  for (i = 1; i <= n; ++i) {
    if (watts[i] * 2 < most) continue
    ++loaded
    if (loaded == 1 || clock[i] < low) low = clock[i]
    if (clock[i] > high) high = clock[i]
    sum += watts[i]
  }
  if (loaded) printf "clocks      SM %d to %d MHz, power %.0f W (largest %d W), %d samples under load\n", low, high, sum / loaded, most, loaded
}
