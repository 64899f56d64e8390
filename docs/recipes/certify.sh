#!/usr/bin/env bash
# Certify two prediction files and fail unless the verdict is `certified`.
#
#   OLD=old.csv NEW=new.csv MARGIN=0.02 bash certify.sh
#   PREDICTIONS=both.csv MARGIN=0.02 bash certify.sh
#
# MARGIN may hold several, separated by spaces: "0.02 snowy=0.05". CONFIDENCE, TARGET and LABELS are optional. The
# certificate is written to CERTIFICATE (certificate.json); on GitHub the report also goes to the job's summary.
set -uo pipefail

arguments=()
if [[ -n "${PREDICTIONS:-}" ]]; then
  arguments+=(--predictions "$PREDICTIONS")
else
  arguments+=(--old "${OLD:?set PREDICTIONS, or OLD and NEW}" --new "${NEW:?set PREDICTIONS, or OLD and NEW}")
fi
for margin in ${MARGIN:?set MARGIN, the loss of accuracy you accept}; do
  arguments+=(--margin "$margin")
done
[[ -n "${CONFIDENCE:-}" ]] && arguments+=(--confidence "$CONFIDENCE")
[[ -n "${TARGET:-}" ]] && arguments+=(--target "$TARGET")
[[ -n "${LABELS:-}" ]] && arguments+=(--labels "$LABELS")

report=$(holdfast certify "${arguments[@]}" --out "${CERTIFICATE:-certificate.json}")
code=$?
echo "$report"
if [[ -n "${GITHUB_STEP_SUMMARY:-}" ]]; then
  printf '### holdfast certify\n\n```\n%s\n```\n' "$report" >> "$GITHUB_STEP_SUMMARY"
fi
case $code in
  0) ;;
  2) echo "::error::holdfast certify: bad input" ;;
  3) echo "::error::holdfast certify: a protected task regressed" ;;
  4) echo "::error::holdfast certify: undecided, the evidence does not suffice" ;;
  *) echo "::error::holdfast certify failed" ;;
esac
exit $code
