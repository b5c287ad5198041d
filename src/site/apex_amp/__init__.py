"""The distribution apex-amp. Importing it installs the finder where ``.pth`` files are not read."""

import _apex_amp

_apex_amp.install()
