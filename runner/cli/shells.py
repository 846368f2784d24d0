"""Scripts that complete ``clip-runner`` and ``python -m runner`` in a shell."""

BASH = r"""# eval "$(clip-runner -sc install=bash)"
_clip_runner() {
    local line=${COMP_LINE:0:COMP_POINT} word found
    local current=${line##* } program=("${COMP_WORDS[0]}" "$@")
    COMPREPLY=()
    while IFS= read -r word; do
        [[ -n $word ]] || continue
        [[ $word == *[=./] ]] || word+=" "
        # bash replaces only what follows the last "=".
        [[ $COMP_WORDBREAKS == *=* && $current == *=* ]] && word=${word#"${current%=*}="}
        COMPREPLY+=("$word")
    done < <(COMP_LINE=$line COMP_POINT=${#line} "${program[@]}" -sc query=bash 2>/dev/null)
}
_clip_runner_program() { _clip_runner; }
_clip_runner_module() {
    if [[ ${COMP_WORDS[1]} == -m && ${COMP_WORDS[2]} == runner && COMP_CWORD -gt 2 ]]; then
        _clip_runner -m runner
    elif [[ -n $_clip_runner_other ]]; then
        "$_clip_runner_other" "$@"
    fi
}
_clip_runner_other=$(complete -p python 2>/dev/null | sed -n 's/.*-F \([^ ]*\) .*/\1/p')
[[ $_clip_runner_other == _clip_runner_module ]] && _clip_runner_other=
complete -o nospace -o default -F _clip_runner_program clip-runner
complete -o nospace -o default -F _clip_runner_module python python3
"""

ZSH = r"""# eval "$(clip-runner -sc install=zsh)"
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
_clip_runner() {
    local line="${(j: :)words[1,CURRENT-1]} $PREFIX"
    local -a program found
    program=("${words[1]}" "$@")
    found=(${(f)"$(COMP_LINE=$line COMP_POINT=${#line} $program -sc query=zsh 2>/dev/null)"})
    (( $#found )) || { _files; return; }
    compadd -Q -S '' -- ${(M)found:#*[=./]}
    compadd -Q -- ${found:#*[=./]}
}
_clip_runner_program() { _clip_runner; }
_clip_runner_module() {
    if [[ ${words[2]} == -m && ${words[3]} == runner && CURRENT -gt 3 ]]; then
        _clip_runner -m runner
    else
        _python "$@"
    fi
}
compdef _clip_runner_program clip-runner
compdef _clip_runner_module python python3
"""

FISH = r"""# clip-runner -sc install=fish | source
function _clip_runner
    set -l program (commandline -opc)[1]
    env COMP_LINE=(commandline -cp) $program $argv -sc query=fish 2>/dev/null
end
function _clip_runner_is_module
    set -l words (commandline -opc)
    test (count $words) -ge 3; and test "$words[2] $words[3]" = "-m runner"
end
complete -c clip-runner -f -a '(_clip_runner)'
complete -c python -n _clip_runner_is_module -f -a '(_clip_runner -m runner)'
complete -c python3 -n _clip_runner_is_module -f -a '(_clip_runner -m runner)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
