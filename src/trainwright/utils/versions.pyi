from trainwright.core.names.packages import compare_versions as compare_versions
from trainwright.core.names.packages import is_torch_version as is_torch_version
