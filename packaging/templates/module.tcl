#%Module
# Made by packaging/recipes.py, for Environment Modules. The one line to change: the path of its environment.
set root [expr {[info exists ::env(DISTGPT_ROOT)] ? $::env(DISTGPT_ROOT) : "/opt/distgpt/@VERSION@"}]

proc ModulesHelp {} {
    puts stderr "@DESCRIPTION@
distgpt --help lists the commands, distgpt help the pages."
}
module-whatis "distgpt @VERSION@: @DESCRIPTION@"

conflict distgpt
# The site's own MPI, if the installation has no wheel of one: module load openmpi
prepend-path PATH $root/bin
# Packages in a user's home do not take the place of these.
setenv PYTHONNOUSERSITE 1
