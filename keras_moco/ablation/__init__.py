"""Ablation studies: what varies, the runs, their table and pictures."""

from keras_moco.ablation.jobs import default_jobs, work_through
from keras_moco.ablation.studies import (
    STUDIES,
    Study,
    as_settings,
    find_study,
    parse_vary,
)
from keras_moco.ablation.table import (
    notes,
    summarize,
    table_lines,
    write_tables,
)
from keras_moco.ablation.trial import Trial, epochs, read_run

__all__ = [
    "STUDIES",
    "Study",
    "Trial",
    "as_settings",
    "default_jobs",
    "epochs",
    "find_study",
    "notes",
    "parse_vary",
    "read_run",
    "summarize",
    "table_lines",
    "work_through",
    "write_tables",
]
