{{/* What Kubernetes, KubeRay or Ray would refuse, or take and do otherwise: said while rendering, by the name of the value. */}}
{{- define "dspark.refusals" -}}
{{- include "dspark.refuseSections" . -}}
{{- include "dspark.refuseGroups" . -}}
{{- include "dspark.refuseVolumes" . -}}
{{- include "dspark.refuseNames" . -}}
{{- include "dspark.refusePorts" . -}}
{{- with .Values.autoscaling.gateway -}}
{{- if gt (int .minReplicas) (int .maxReplicas) }}{{ fail (printf "autoscaling.gateway: minReplicas is %d and maxReplicas %d; set both" (int .minReplicas) (int .maxReplicas)) }}{{ end -}}
{{- if and (gt (int .maxReplicas) 0) (eq (int .minReplicas) 0) }}{{ fail (printf "autoscaling.gateway: maxReplicas is %d and minReplicas 0, which is no autoscaling; set both" (int .maxReplicas)) }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* A key without anything below it is null, and Helm takes the chart's own values away for it. */}}
{{- define "dspark.refuseSections" -}}
{{- range $key := list "settings" "image" "rayAuth" "apiKeys" "hfToken" "modelCache" "head" "workerGroups" "autoscaling" "service" "ingress" "httpRoute" "probes" "serveProxy" "podDisruptionBudget" "networkPolicy" "serviceAccount" "logging" "serviceMonitor" "podMonitor" "prometheusRule" "grafanaDashboards" -}}
{{- if not (kindIs "map" (get $.Values $key)) }}{{ fail (printf "%s: is null; leave the key away, or write {} for the chart's own values" $key) }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "dspark.refuseGroups" -}}
{{- $pods := 0 -}}
{{- range $name, $group := .Values.workerGroups }}{{ if not (kindIs "invalid" $group) -}}
{{- $sizes := include "dspark.sizes" $group | fromYaml -}}
{{- $pods = add $pods (include "dspark.most" (dict "root" $ "group" $group) | int) -}}
{{- if gt (int $sizes.least) (int $sizes.pods) }}{{ fail (printf "workerGroups.%s: replicas is %d and minReplicas %d; set both" $name (int $sizes.pods) (int $sizes.least)) }}{{ end -}}
{{- end }}{{ end -}}
{{- if eq (int $pods) 0 }}{{ fail "workerGroups: at least one group with a pod is needed; the head runs no replicas" }}{{ end -}}
{{- if and .Values.modelCache.enabled (not .Values.modelCache.existingClaim) (gt (int $pods) 1) (not (has "ReadWriteMany" .Values.modelCache.accessModes)) -}}
{{- fail "modelCache.accessModes: the worker groups may have more than one pod, which share the cache; use ReadWriteMany, or set modelCache.enabled to false" -}}
{{- end -}}
{{- end -}}

{{- define "dspark.refuseVolumes" -}}
{{- $paths := list "/tmp" "/dev/shm" "/cache" "/etc/dspark/keys" -}}
{{- $names := list -}}
{{- range .Values.modelVolumes -}}
{{- $sources := 0 -}}
{{- $volume := . -}}
{{- range $key := list "claim" "image" "fetch" }}{{ if get $volume $key }}{{ $sources = add $sources 1 }}{{ end }}{{ end -}}
{{- if ne (int $sources) 1 }}{{ fail (printf "modelVolumes: %s needs a claim, an image or a fetch, and one of them only" .name) }}{{ end -}}
{{- if and (get . "subPath") (not (get . "claim")) }}{{ fail (printf "modelVolumes: %s has a subPath, which is for a claim" .name) }}{{ end -}}
{{- if has .name $names }}{{ fail (printf "modelVolumes: two have the name %s" .name) }}{{ end -}}
{{- $path := .mountPath | trimSuffix "/" -}}
{{- if has $path $paths }}{{ fail (printf "modelVolumes: %s is mounted at %s, where something is mounted already" .name .mountPath) }}{{ end -}}
{{- $names = append $names .name }}{{ $paths = append $paths $path -}}
{{- end -}}
{{- end -}}

{{/* Labels and variables that the chart sets itself. Twice in a list or mapping, one of them is dropped, or the whole refused. */}}
{{- define "dspark.refuseNames" -}}
{{- range $key, $_ := .Values.podLabels -}}
{{- if has $key (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component") }}{{ fail (printf "podLabels: %s is set by the chart, and the services, monitors and policies find pods by it" $key) }}{{ end -}}
{{- end -}}
{{- $ours := list -}}
{{- range include "dspark.environment" . | fromYamlArray }}{{ $ours = append $ours .name }}{{ end -}}
{{- range .Values.extraEnv -}}
{{- if has .name $ours }}{{ fail (printf "extraEnv: %s is set by the chart, or twice" .name) }}{{ end -}}
{{- $ours = append $ours .name -}}
{{- end -}}
{{- end -}}

{{/* Every node has a proxy, the head too, and there Ray listens as well. */}}
{{- define "dspark.refusePorts" -}}
{{- $port := include "dspark.port" . | int -}}
{{- if has $port (list 6379 8080 8265 10001) }}{{ fail (printf "settings.gateway.port: %d is a port of Ray; take another" $port) }}{{ end -}}
{{- if and .Values.serveProxy.haproxy (or (has $port (list 8404 9101)) (and (ge $port 30000) (le $port 31000)) (and (ge $port 40000) (le $port 41000))) }}{{ fail (printf "settings.gateway.port: %d is a port of HAProxy or of the replicas behind it; take another" $port) }}{{ end -}}
{{- end -}}
