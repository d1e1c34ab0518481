-- Made by packaging/recipes.py, for Lmod. The one line to change: the path of its environment.
local root = os.getenv("DISTGPT_ROOT") or "/opt/distgpt/@VERSION@"

help([[@DESCRIPTION@
distgpt --help lists the commands, distgpt help the pages.]])
whatis("Name: distgpt")
whatis("Version: @VERSION@")
whatis("Description: @DESCRIPTION@")

conflict("distgpt")
-- The site's own MPI, if the installation has no wheel of one: depends_on("openmpi")
prepend_path("PATH", pathJoin(root, "bin"))
-- Packages in a user's home do not take the place of these.
setenv("PYTHONNOUSERSITE", "1")
