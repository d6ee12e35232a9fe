"""Read labelled images, write them as files of IDX, or generate them: data of the image models.

Imports: `trainer.data`, `files`, `errors`, numpy. No jax. Used by: `trainer.data`, by the entry point;
`contrib.texts`; users, who write images of their own.
"""

from ._images import NAMES as NAMES
from ._images import IdxPart as IdxPart
from ._images import ImageFiles as ImageFiles
from ._images import LabelledImages as LabelledImages
from ._images import files_of as files_of
from ._images import idx_parts as idx_parts
from ._images import open_images as open_images
from ._images import read_idx as read_idx
from ._images import resized as resized
from ._images import write_idx as write_idx
from ._images import write_images as write_images
from ._images import write_sample_images as write_sample_images
