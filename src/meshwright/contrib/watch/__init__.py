"""Follow runs while they run: `meshwright watch`, a page in the browser or a screen of the terminal.

It reads the folders of runs and writes nothing there. Imports: `cli`, `measure`, `report`, `files`. Used by:
users.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._server import Watcher as Watcher
    from ._shelf import Shelf as Shelf
    from ._watch_page import static_page as static_page

__getattr__, __dir__ = names_on_first_use(__name__)
