"""Every decoder of data that Myriad does not trust, as a function of bytes, for tests and for `fuzz`.

A target decodes an input through public functions, and uses what it returns as its first reader does. It may
raise only the errors that these functions document. `TARGETS` is the table of all of them; ``slow`` ones read
files that hold more than a header, at a few hundred to a few thousand a second.
"""

from checkpoint_decoders import CHECKPOINT_TARGETS
from decoder_target import Target, check
from file_decoders import FILE_TARGETS
from framework_decoders import FRAMEWORK_TARGETS
from message_decoders import MESSAGE_TARGETS
from run_table_decoders import RUN_TABLE_TARGETS

__all__ = ["TARGETS", "Target", "check"]

TARGETS: tuple[Target, ...] = (
    *MESSAGE_TARGETS,
    *CHECKPOINT_TARGETS,
    *FILE_TARGETS,
    *FRAMEWORK_TARGETS,
    *RUN_TABLE_TARGETS,
)
